"""The demo from end to end: corpus, tokenizer, two datasets, and the claims about them, each computed.

Everything it writes lies in one folder. A folder that holds anything else is refused; what an earlier demo
left there is replaced.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.demo.corpus import Document, write_corpus
from shardkit.demo.proof import Proof
from shardkit.demo.proofs import prove_exactly_once, prove_intact, prove_provenance, prove_same_rows
from shardkit.demo.resume import prove_resume
from shardkit.demo.speed import measure_loader
from shardkit.demo.tokenizer import EOS, train_tokenizer
from shardkit.errors import ShardkitError

__all__ = ["DemoReport", "clean_demo", "run_demo"]

MIN_MEGABYTES, MAX_MEGABYTES = 1.0, 1000.0
MARKER = ".shardkit-demo"
OWN_NAMES = (
    "corpus",
    "tokenizer.json",
    "recipe.yaml",
    "work",
    "mds",
    "tar",
    "training",
    "report.json",
    MARKER,
)
SEQUENCE_LENGTH = 2048

RECIPE = f"""\
# Written by `shardkit demo`. Build it again with: shardkit build recipe.yaml --set output.path=again
inputs:
  - path: corpus/documentation.parquet
    source: documentation
    metadata: [kind]
  - path: corpus/source-*.jsonl.gz
    source: python
    metadata: [kind]
filters:
  - length: {{min_words: 20}}
dedup:
  exact: {{}}
tokenizer:
  path: tokenizer.json
  eos: "{EOS}"
pack:
  sequence_length: {SEQUENCE_LENGTH}
  strategy: best_fit
output:
  path: mds
  format: mds
  shard_bytes: 1MiB
work: work
"""


@dataclass(frozen=True)
class DemoReport:
    """All that the demo measured; `to_dict` is what `--json` prints."""

    output: Path
    seconds: float
    corpus: Mapping[str, Any]
    vocabulary: int
    tokenizer_seconds: float
    builds: Mapping[str, Mapping[str, Any]]
    funnel: Mapping[str, Any]
    loader: Mapping[str, float] | None
    proofs: tuple[Proof, ...]

    @property
    def passed(self) -> bool:
        """No claim failed; a skipped one does not count."""
        return all(proof.passed is not False for proof in self.proofs)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self) | {"passed": self.passed, "output": str(self.output)}


def run_demo(output: Path, megabytes: float, say: Callable[[str], None]) -> DemoReport:
    """Run every step in `output`; `say` hears what happens next."""
    start = time.perf_counter()
    if not MIN_MEGABYTES <= megabytes <= MAX_MEGABYTES:
        raise ShardkitError(f"--megabytes {megabytes:g}: choose from {MIN_MEGABYTES:g} to {MAX_MEGABYTES:g}")
    output = output.absolute()
    _prepare(output)
    say("gathering text from this Python installation")
    corpus, documents = write_corpus(output / "corpus", int(megabytes * 1e6))
    say("training a tokenizer")
    vocabulary, tokenizer_seconds = _train_tokenizer(output / "tokenizer.json", documents)
    builds, funnel = _build_both(output, say)
    say("comparing, counting, tracing")
    mds, tar = output / "mds", output / "tar"
    proofs = [
        prove_same_rows([mds, tar]),
        prove_intact([mds, tar]),
        prove_provenance(mds, output, output / "tokenizer.json"),
        prove_exactly_once(mds, builds["mds"]["samples"]),
    ]
    say("training, killing, resuming")
    proofs.append(prove_resume(mds, output / "training", vocabulary))
    say("timing the loader")
    report = DemoReport(
        output=output,
        seconds=time.perf_counter() - start,
        corpus=dataclasses.asdict(corpus),
        vocabulary=vocabulary,
        tokenizer_seconds=tokenizer_seconds,
        builds=builds,
        funnel=funnel,
        loader=measure_loader(mds),
        proofs=tuple(proofs),
    )
    report = dataclasses.replace(report, seconds=time.perf_counter() - start)
    (output / "report.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    return report


def clean_demo(output: Path) -> None:
    """Remove what the demo wrote, and the folder if nothing else is in it."""
    for name in OWN_NAMES:
        path = output / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if output.is_dir() and not any(output.iterdir()):
        output.rmdir()


def _prepare(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise ShardkitError(f"{output} is not a folder; choose another --output")
    if output.is_dir() and any(output.iterdir()):
        if not (output / MARKER).exists():
            raise ShardkitError(f"{output} holds files that no demo wrote; choose another --output")
        clean_demo(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).write_text("This folder was made by `shardkit demo`.\n")


def _train_tokenizer(file: Path, documents: list[Document]) -> tuple[int, float]:
    start = time.perf_counter()
    vocabulary = train_tokenizer(file, documents)
    return vocabulary, time.perf_counter() - start


def _build_both(output: Path, say: Callable[[str], None]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Build MDS, then tar shards, from the recipe on disk; both through the public `build`."""
    from shardkit.writers import build

    recipe = output / "recipe.yaml"
    recipe.write_text(RECIPE)
    builds = {}
    for name, overrides in (("mds", []), ("tar", ["output.path=tar", "output.format=wds"])):
        say(f"building the {name} dataset")
        builds[name] = build(recipe, overrides=overrides, progress=False).to_dict()
    return builds, builds["mds"]["funnel"]
