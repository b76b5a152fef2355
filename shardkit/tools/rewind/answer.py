"""Answers `shardkit trace --losses` as plain data: spikes, suspects, a list for the loader, and how to go on.

The run goes on from the last checkpoint before all candidates of a spike: the first one from which the loss
has not recovered, or else the last one. With a mask, the order stays and the state loads as it is; with an
exclusion list, the state continues at its position in the order of the rows that are left ("fork").
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardkit.datasets.provenance.answers import Tracer
from shardkit.datasets.provenance.outputs import write_exclusions, write_mask
from shardkit.datasets.provenance.run import Run
from shardkit.datasets.provenance.search import Selection
from shardkit.datasets.provenance.table import Piece, pieces_of
from shardkit.errors import ShardkitError
from shardkit.order.exclusions import Exclusions
from shardkit.order.order import MAX_POSITION
from shardkit.order.token_mask import TokenMask
from shardkit.tools.rewind.checkpoints import Checkpoint, SavedRun
from shardkit.tools.rewind.losses import (
    LossLog,
    Spike,
    SpikeOptions,
    find_spikes,
    read_losses,
)
from shardkit.tools.rewind.suspects import Findings, Suspect, find_suspects, first_candidate


def rewind(
    tracer: Tracer,
    run: Run,
    saved: SavedRun | None,
    file: BinaryIO,
    name: str,
    options: SpikeOptions,
    *,
    limit: int = 20,
    exclude: Path | None = None,
    mask: Path | None = None,
    without: Sequence[Path] = (),
) -> dict[str, Any]:
    """Find the spikes in the log `file` of a run, and rank the documents of their steps.

    `limit` is the maximum number of listed spikes and documents (0: all). `exclude` or `mask` is the list to
    write, `without` has the exclusion lists of the run. Raises ShardkitError if log and run do not fit.
    """
    log = read_losses(file, name, options)
    notices = _check(run, saved, log, options)
    spikes = find_spikes(log, options)
    found = find_suspects(tracer, run, log, spikes, options) if spikes else Findings()
    if len(found.examined) < len(spikes):
        notices.append(
            f"the documents of the {len(found.examined):,} highest of {len(spikes):,} spikes were looked at"
        )
    lists = _write(tracer, run, found.chosen, exclude, mask)
    documents, several = found.suspects[: limit or None], spikes[: limit or None]
    return {
        "log": _log(log),
        "spike_count": len(spikes),
        "spikes": [
            _spike(one, options) | {"examined": number in found.examined, "alike": number in found.alike}
            for number, one in enumerate(several)
        ],
        "document_count": len(found.suspects),
        "documents": [_document(one, found, spikes) for one in documents],
        "chosen": len(found.chosen),
        "sources": found.sources,
        "hosts": found.hosts,
        "lists": lists,
        "continue": _continue(run, saved, spikes, options, lists, without) if spikes else None,
        "notices": notices,
        "problem": tracer.problem,
        "no_text": tracer.no_text if found.suspects else None,
    }


def _log(log: LossLog) -> dict[str, Any]:
    return {
        "file": log.name,
        "column": log.column,
        "losses": len(log.steps),
        "steps": [int(log.steps[0]), int(log.steps[-1])],
        "first_step": log.first_step,
        "repeated": log.repeated,
        "skipped_lines": log.skipped,
    }


def _check(run: Run, saved: SavedRun | None, log: LossLog, options: SpikeOptions) -> list[str]:
    """Return notices on what is odd about log and run. Raises ShardkitError if they do not fit."""
    assert run.plan is not None
    last = int(log.steps[-1])
    if last * run.accumulate * run.plan.global_batch >= MAX_POSITION:
        raise ShardkitError(f"{log.name}: no run has a step {last:,}")
    notices = []
    if len(log.steps) <= (least := options.least_before):
        notices.append(
            f"the log has {len(log.steps):,} losses; a finite one can be suspicious only after {least}"
        )
    if saved is None:
        return notices
    notices += [f"skipped: {problem}" for problem in saved.unread]
    for one in saved.checkpoints:
        if steps_before(run, one.state.position) is None:
            batch = f"{run.plan.batch_size:,} on {run.plan.world_size:,} ranks"
            raise ShardkitError(
                f"{one.file}: is at position {one.state.position:,}, where no batch of {batch} begins; give "
                "the run's --batch-size and --world-size; if they have changed, ask with --position"
            )
    if saved.logged is not None and (logged := steps_before(run, saved.logged) or 0) < last:
        raise ShardkitError(
            f"{log.name}: has a loss of step {last:,}, but the usage logs end with step {logged:,}: it is "
            "the log of another run, or batch size, ranks or --accumulate are not those of the run"
        )
    furthest = saved.checkpoints[-1] if saved.checkpoints else None
    if furthest is not None and (at := steps_before(run, furthest.state.position) or 0) > last:
        notices.append(
            f"{furthest.file} is of step {at:,}, but the log ends with step {last:,}: is it of this run?"
        )
    return notices


def steps_before(run: Run, position: int) -> int | None:
    """Return how many whole steps a run has taken at a position; None if no batch begins there."""
    assert run.plan is not None
    start = run.plan.start(position)
    batch = run.plan.step_of(start)
    if batch is None or run.plan.start_of_step(batch) != start:
        return None
    return (batch - 1) // run.accumulate


def _spike(spike: Spike, options: SpikeOptions) -> dict[str, Any]:
    return {
        "step": spike.step,
        "loss": _plain(spike.loss),
        "median": _plain(spike.median),
        "score": _plain(spike.score),
        "steps": list(spike.steps),
        "first_candidate": first_candidate(spike, options),
        "recovered": spike.recovered,
    }


def _plain(number: float) -> float | str | None:
    """Return a number that JSON has; NaN becomes null, infinities become text."""
    if math.isnan(number):
        return None
    return number if math.isfinite(number) else str(number)


def _document(suspect: Suspect, found: Findings, spikes: Sequence[Spike]) -> dict[str, Any]:
    """Describe a document, with the piece of it that is a candidate first."""
    [facts] = suspect.tracer.pieces(suspect.pieces[:1])
    return {
        "evidence": suspect.evidence,
        "steps": [spikes[number].step for number in sorted(suspect.shares)],
        "shares": [suspect.shares[number] for number in sorted(suspect.shares)],
        "shared": suspect.shared,
        "unusual": suspect.unusual,
        "chosen": any(suspect is one for one in found.chosen),
        "dataset": suspect.tracer.dataset.location,
        **facts,
    }


def _write(
    tracer: Tracer, run: Run, chosen: Sequence[Suspect], exclude: Path | None, mask: Path | None
) -> list[dict[str, Any]]:
    """Write a list for each dataset that has chosen documents, to the file given for that of `tracer`.

    The files of other datasets of a mixture have the number of the stream behind their name.
    """
    lists = []
    for number, dataset in enumerate(run.datasets):
        here = [one for one in chosen if one.tracer.dataset is dataset]
        if (file := exclude or mask) is None or not here or dataset in run.datasets[:number]:
            continue
        if dataset is not tracer.dataset:
            file = file.with_name(f"{file.stem}-{number}{file.suffix}")
        written = _write_exclusions(run, here, file) if exclude else _write_mask(here, file)
        facts: dict[str, Any] = {
            "kind": "exclude" if exclude else "mask",
            "file": str(file),
            "documents": len(here),
        }
        lists.append(facts | {"fingerprint": dataset.fingerprint} | written)
    return lists


def _pieces(suspects: Sequence[Suspect]) -> list[Piece]:
    """Return all pieces of documents in their dataset; without tables, those in candidate rows."""
    pieces = [piece for one in suspects for piece in one.pieces]
    if (table := suspects[0].tracer.table) is None:
        return pieces
    ids = {piece.document_id for piece in pieces}
    return [piece for some in table.search(Selection(documents=ids)) for piece in pieces_of(some)]


def _write_mask(suspects: Sequence[Suspect], file: Path) -> dict[str, int]:
    dataset = suspects[0].tracer.dataset
    spans = [_span(piece) for piece in _pieces(suspects)]
    if any(begin == end for _, begin, end in spans):
        raise ShardkitError(f"{dataset.location}: has no rows of tokens to mask; give --exclude FILE")
    tokens = TokenMask(np.array(spans, np.int64))
    write_mask(file, dataset, tokens, len(suspects))
    return {"rows": tokens.rows, "tokens": tokens.tokens}


def _write_exclusions(run: Run, suspects: Sequence[Suspect], file: Path) -> dict[str, int]:
    """Write the rows of documents, and the rows that the run has excluded before."""
    dataset = suspects[0].tracer.dataset
    rows = Exclusions.of(np.array([piece.sample_id for piece in _pieces(suspects)], np.int64))
    before = [one for one in map(run.exclusions_of, run.streams_of(dataset)) if one is not None]
    merged = Exclusions([pair for one in (rows, *before) for pair in one.to_list()])
    why = [f"rows of {len(suspects):,} documents of steps at which the loss jumped: {rows.count:,}"]
    write_exclusions(file, dataset, merged, why)
    return {"rows": merged.count, "new_rows": rows.count}


def _span(piece: Piece) -> tuple[int, int, int]:
    return piece.sample_id, piece.token_start, piece.token_end


def _continue(
    run: Run,
    saved: SavedRun | None,
    spikes: Sequence[Spike],
    options: SpikeOptions,
    lists: Sequence[Mapping[str, Any]],
    without: Sequence[Path],
) -> dict[str, Any]:
    """Say from which step and checkpoint the run goes on, and by which lines of code."""
    assert run.plan is not None
    spike = next((one for one in spikes if not one.recovered), spikes[-1])
    last = first_candidate(spike, options) - 1
    checkpoint: Checkpoint | None = None
    for one in () if saved is None else saved.checkpoints:
        if (steps_before(run, one.state.position) or 0) <= last:
            checkpoint = one
    position = run.plan.start_of_step(last * run.accumulate + 1)
    return {
        "spike": spike.step,
        "step": last if checkpoint is None else steps_before(run, checkpoint.state.position),
        "position": position if checkpoint is None else checkpoint.state.position,
        "checkpoint": None if checkpoint is None else str(checkpoint.file),
        "code": _code(run, checkpoint, lists, without) if lists else [],
    }


def _code(
    run: Run, checkpoint: Checkpoint | None, lists: Sequence[Mapping[str, Any]], without: Sequence[Path]
) -> list[str]:
    """Return the lines that make the loader of the run again, with the lists, and load its state."""
    assert run.plan is not None
    settings, is_mask = run.settings, lists[0]["kind"] == "mask"
    of_dataset = {one["fingerprint"]: one["file"] for one in lists}
    weights = None if settings.schedule is None else settings.schedule.weights_at(0)
    digests = {Exclusions.read(path).digest: path for path in without}
    streams = []
    for number, (stream, dataset) in enumerate(zip(settings.streams, run.datasets, strict=True)):
        words = [repr(dataset.location)]
        words += [] if weights is None else [f"weight={weights[number]}"]
        words += [f"name={stream.name!r}"] if stream.name and weights is not None else []
        given = {"exclude": str(digests[stream.excluded])} if stream.excluded in digests else {}
        if dataset.fingerprint in of_dataset:
            given[lists[0]["kind"]] = of_dataset[dataset.fingerprint]
        words += [f"{kind}={path!r}" for kind, path in given.items()]
        streams.append(f"Stream({', '.join(words)})")
    order = settings.order
    words = [f"[{', '.join(streams)}]", f"batch_size={run.plan.batch_size}", f"seed={order.seed}"]
    words += [f"shuffle={order.shuffle!r}"] if order.shuffle != "window" else []
    words += [f"tail={settings.tail!r}"] if settings.tail != "carry" else []
    words += ["labels='shifted'"] if is_mask else []
    fork = "" if is_mask else ", on_mismatch='fork'"
    lines = ["from shardkit import Stream, StreamingLoader", ""]
    if checkpoint is None:
        lines += ["state = ...  # the loader's, of that checkpoint"]
    else:
        keys = "".join(f"[{key!r}]" for key in checkpoint.keys)
        file = json.dumps(str(checkpoint.file), ensure_ascii=False)
        is_json = checkpoint.file.suffix not in (".pt", ".pth", ".ckpt", ".bin")
        lines.insert(0, "import json" if is_json else "import torch")
        read = (
            f"json.load(open({file}))"
            if is_json
            else f"torch.load({file}, map_location='cpu', weights_only=True)"
        )
        lines += [f"state = {read}{keys}"]
    rest = "  # and the other options of the run"
    made = f"loader = StreamingLoader({', '.join(words)}){rest}"
    return [*lines, made, f"loader.load_state_dict(state{fork})"]
