"""The demo's claims about a finished dataset, each computed from the files that were just built.

Rows are compared by a digest of all tokens in dataset order. Exactly-once is counted: every sample id of an
epoch, as each of R ranks receives it. The past of a token is followed back: provenance names a source
record, and that record's text must hold the decoded tokens.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.dataset import Dataset, open_dataset
from shardkit.demo.proof import NO_TORCH, Proof
from shardkit.units import format_bytes
from shardkit.verify import verify

__all__ = ["prove_exactly_once", "prove_intact", "prove_provenance", "prove_same_rows"]

GLOBAL_BATCH = 12  # divides by 1, 2 and 3 ranks
SEED = 17


def prove_same_rows(paths: Sequence[Path]) -> Proof:
    """All datasets hold the same rows of tokens in the same order, whatever their formats."""
    digests = {}
    rows = tokens = 0
    for path in paths:
        with open_dataset(path) as dataset:
            digests[path.name] = rows_digest(dataset)
            rows, tokens = len(dataset), len(dataset) * (dataset.sequence_length or 0)
    same = len(set(digests.values())) == 1
    evidence = f"{rows:,} rows, {tokens:,} tokens, blake2b {next(iter(digests.values()))[:12]} from each"
    if not same:
        evidence = "digests differ: " + ", ".join(f"{name} {digest[:12]}" for name, digest in digests.items())
    name = f"{' and '.join(digests)} hold the same rows"
    return Proof(name, same, evidence, {"rows": rows, "tokens": tokens, "digests": digests})


def rows_digest(dataset: Dataset) -> str:
    """Hex blake2b-128 of all tokens, row after row in dataset order."""
    state = hashlib.blake2b(digest_size=16)
    column = dataset.token_column
    assert column is not None, "the demo builds packed rows"
    for number in range(len(dataset.manifest.shards)):
        rows = dataset.shard(number).fixed_rows(column)
        assert rows is not None, "packed rows have a constant stride"
        state.update(np.ascontiguousarray(rows).tobytes())
    return state.hexdigest()


def prove_intact(paths: Sequence[Path]) -> Proof:
    """All shards match the hashes in their index, and all counts agree, as `shardkit verify` checks."""
    reports = [verify(path) for path in paths]
    shards, size = sum(report.hashed for report in reports), sum(report.bytes for report in reports)
    problems = [f"{problem.file}: {problem.problem}" for report in reports for problem in report.problems]
    evidence = f"hashes and structure of {shards} shards, {format_bytes(size)}"
    name = "every shard is what its index says"
    figures = {"shards": shards, "bytes": size, "problems": problems}
    return Proof(name, not problems, "; ".join(problems[:3]) or evidence, figures)


def prove_exactly_once(path: Path, samples: int, world_sizes: Sequence[int] = (1, 2, 3)) -> Proof:
    """One epoch delivers each sample once, and the same global batches, for every number of ranks."""
    name = f"every sample exactly once, on {', '.join(map(str, world_sizes[:-1]))} or {world_sizes[-1]} ranks"
    if importlib.util.find_spec("torch") is None:
        return Proof(name, None, NO_TORCH)
    counts, batches = {}, set()
    for world_size in world_sizes:
        ranks = [_epoch_ids(path, rank, world_size) for rank in range(world_size)]
        steps = [np.sort(np.concatenate(parts)) for parts in zip(*ranks, strict=True)]
        seen = np.bincount(np.concatenate(steps), minlength=samples)
        counts[world_size] = {
            "samples": int(seen.sum()),
            "missing": int((seen == 0).sum()),
            "repeated": int((seen > 1).sum()),
            "unknown": len(seen) - samples,
        }
        batches.add(hashlib.blake2b(b"|".join(step.tobytes() for step in steps)).hexdigest())
    expected = {"samples": samples, "missing": 0, "repeated": 0, "unknown": 0}
    passed = len(batches) == 1 and all(count == expected for count in counts.values())
    evidence = f"{samples:,} ids counted for each; the same global batches every time"
    if not passed:
        evidence = f"counts by ranks: {counts}; global batches {'equal' if len(batches) == 1 else 'differ'}"
    return Proof(name, passed, evidence, {"world_sizes": counts})


def _epoch_ids(path: Path, rank: int, world_size: int) -> list[npt.NDArray[np.int64]]:
    """Sample ids of each of a rank's batches of one epoch, without the padding that fills the last one."""
    from shardkit.loaders import StreamingLoader

    loader = StreamingLoader(
        path,
        batch_size=GLOBAL_BATCH // world_size,
        seed=SEED,
        tail="pad",
        rank=rank,
        world_size=world_size,
        return_ids=True,
    )
    return [batch["sample_id"][~batch["is_padding"]].numpy() for batch in loader]


def prove_provenance(path: Path, recipe_folder: Path, tokenizer_file: Path, rows: int = 200) -> Proof:
    """Rows spread over the dataset decode to the text of the source records that provenance names."""
    from tokenizers import Tokenizer

    from shardkit.trace.table import ProvenanceTable, pieces_of

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    sources: dict[str, list[str]] = {}
    pieces = 0
    wrong = []
    with open_dataset(path) as dataset:
        samples = np.unique(np.linspace(0, len(dataset) - 1, rows).astype(int)).tolist()
        for piece in pieces_of(ProvenanceTable(dataset).of_rows(samples)):
            tokens = np.asarray(dataset[piece.sample_id][dataset.token_column or ""])
            if piece.file not in sources:
                sources[piece.file] = read_records(recipe_folder / piece.file)
            ids = tokens[piece.token_start : piece.token_end].tolist()
            # A document longer than a row may be cut inside a character: that part decodes to U+FFFD.
            text = tokenizer.decode(ids, skip_special_tokens=True).strip("\ufffd")
            pieces += 1
            if text not in sources[piece.file][piece.record]:
                wrong.append(f"sample {piece.sample_id}, tokens {piece.token_start}:{piece.token_end}")
    name = "every token leads back to its source record"
    figures = {"rows": len(samples), "pieces": pieces, "wrong": wrong[:10]}
    if wrong or not pieces:
        return Proof(name, False, f"{len(wrong)} of {pieces} pieces differ: {'; '.join(wrong[:3])}", figures)
    evidence = f"{pieces:,} pieces of {len(samples)} rows decoded, each found in the record that is named"
    return Proof(name, True, evidence, figures)


def read_records(file: Path) -> list[str]:
    """The texts of one of the demo's input files, read apart from the build."""
    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        texts: list[str] = pq.read_table(file, columns=["text"]).column("text").to_pylist()
        return texts
    with gzip.open(file, "rt", encoding="utf-8", newline="\n") as lines:
        return [json.loads(line)["text"] for line in lines]
