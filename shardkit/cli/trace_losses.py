"""Prints the answer of `shardkit trace --losses` as text: spikes, suspects, and how the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardkit.cli.common import print_columns, stderr_console, stdout_console

_SOURCES_SHOWN = 5


def show_losses(answer: Mapping[str, Any], *, describe: Callable[[Mapping[str, Any]], Sequence[str]]) -> None:
    """Print the answer; `describe` returns the lines that identify a document."""
    console, log = stdout_console(), answer["log"]
    for notice in answer["notices"]:
        stderr_console().print(f"notice: {notice}")
    first, last = log["steps"]
    counted = "" if log["first_step"] == 1 else ", which the log counts from 0, so here each has one more"
    ignored = f"; {log['skipped_lines']:,} lines could not be read" if log["skipped_lines"] else ""
    console.print(f"{log['file']}: {log['losses']:,} losses of steps {first:,} to {last:,}{counted}{ignored}")
    if not answer["spike_count"]:
        console.print("no loss is suspicious", style="bold")
        return
    _show_spikes(answer)
    number, chosen = answer["document_count"], answer["chosen"]
    console.print(
        f"\n{number:,} documents in these steps and before, {chosen:,} of them marked *", style="bold"
    )
    for place, document in enumerate(answer["documents"], 1):
        steps = ", ".join(f"{step:,}" for step in document["steps"][:8])
        steps += ", …" if len(document["steps"]) > 8 else ""
        unusual = document["unusual"]
        text = f"{place:>3}{'*' if document['chosen'] else ' '} evidence {document['evidence']:.2f}, "
        text += f"step {steps}"
        text += "" if unusual is None else f", {unusual:+.2f} nats a token beside the median document"
        console.print(text)
        for line in describe(document):
            console.print(f"     {line}")
    _more(len(answer["documents"]), number, "documents")
    _show_shares(answer)
    _show_list(answer)


def _show_spikes(answer: Mapping[str, Any]) -> None:
    rows = []
    for spike in answer["spikes"]:
        loss = "not finite" if not isinstance(spike["loss"], float) else f"{spike['loss']:.4f}"
        median = "" if spike["median"] is None else f"{spike['median']:.4f}"
        score = "" if not isinstance(spike["score"], float) else f"{spike['score']:.1f}"
        candidates = f"{spike['first_candidate']:,} to {spike['steps'][-1]:,}"
        ends = [] if spike["recovered"] else ["the loss has not recovered"]
        ends += ["no document stands out, so all are marked"] if spike["alike"] else []
        rows.append((f"{spike['step']:,}", loss, median, score, candidates, "; ".join(ends)))
    heads = ("suspicious step", "loss", "median before", "robust z", "candidates", "")
    print_columns("", heads, rows, left=(4, 5))
    _more(len(rows), answer["spike_count"], "spikes")


def _show_shares(answer: Mapping[str, Any]) -> None:
    for kind in ("source", "host"):
        found = answer[f"{kind}s"][:_SOURCES_SHOWN]
        if len(found) > (kind == "source"):
            rows = [
                (one[kind], f"{one['spikes']:,}", f"{one['share']:.1%}", f"{one['usual_share']:.1%}")
                for one in found
            ]
            print_columns("", (kind, "spikes", "of the tokens", "of ordinary steps"), rows)


def _show_list(answer: Mapping[str, Any]) -> None:
    console, then = stdout_console(), answer["continue"]
    for written in answer["lists"]:
        what = f"{written['rows']:,} rows"
        what = f"{written['tokens']:,} tokens in {what}" if written["kind"] == "mask" else what
        console.print(f"\n{written['file']}: {what}, of {written['documents']:,} documents")
    where = f"step {then['step']:,} (position {then['position']:,})"
    if then["checkpoint"] is not None:
        text = f"continue from {then['checkpoint']}, {where}, the last one before the spike at step"
    else:
        text = f"continue from a checkpoint of {where} or before; the spike at step"
    console.print(f"\n{text} {then['spike']:,}" + (":" if then["code"] else ""), style="bold")
    if then["code"]:
        console.print("\n".join(["", *(f"    {line}".rstrip() for line in then["code"])]))
    else:
        console.print(
            "write the documents marked * into a list: --mask FILE keeps the order of the run, and every "
            "other sample comes once; --exclude FILE leaves out their rows, in another order"
        )


def _more(shown: int, count: int, what: str) -> None:
    if shown < count:
        stderr_console().print(f"… and {count - shown:,} more {what}: --limit 0 shows all")
