"""Runs the demo: writes a corpus, trains a tokenizer, builds an MDS and a tar dataset, proves its claims.

Everything is written to one folder. A folder that contains other files is refused; an earlier demo in it is
replaced.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardkit.errors import ShardkitError
from shardkit.tools.demo import proofs
from shardkit.tools.demo.corpus import EOS, train_tokenizer, write_corpus

MIN_MEGABYTES, MAX_MEGABYTES = 1.0, 1000.0
MARKER = ".shardkit-demo"
OWN_NAMES = (
    "corpus", "tokenizer.json", "recipe.yaml", "work", "mds", "tar", "training", "report.json", MARKER,
)  # fmt: skip
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
  sequence_length: 2048
  strategy: best_fit
output:
  path: mds
  format: mds
  shard_bytes: 1MiB
work: work
"""


@dataclass(frozen=True)
class DemoReport:
    """All measurements and proofs of the demo; `--json` prints `to_dict()`."""

    output: Path
    seconds: float
    corpus: Mapping[str, Any]
    vocabulary: int
    tokenizer_seconds: float
    builds: Mapping[str, Mapping[str, Any]]
    funnel: Mapping[str, Any]
    loader: Mapping[str, float] | None
    proofs: tuple[proofs.Proof, ...]

    @property
    def passed(self) -> bool:
        """Whether no claim failed; claims that could not be checked do not count."""
        return all(proof.passed is not False for proof in self.proofs)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return asdict(self) | {"passed": self.passed, "output": str(self.output)}


def run_demo(output: Path, megabytes: float, say: Callable[[str], None]) -> DemoReport:
    """Run all steps of the demo in the folder `output`; `say` is called with the name of each step."""
    from shardkit.writers import build

    start = time.perf_counter()
    if not MIN_MEGABYTES <= megabytes <= MAX_MEGABYTES:
        raise ShardkitError(
            f"--megabytes must be from {MIN_MEGABYTES:g} to {MAX_MEGABYTES:g}, not {megabytes:g}"
        )
    output = output.absolute()
    _prepare(output)
    mds, tar, tokenizer, recipe = (output / name for name in ("mds", "tar", "tokenizer.json", "recipe.yaml"))

    say("gathering text from this Python installation")
    corpus, documents = write_corpus(output / "corpus", int(megabytes * 1e6))

    say("training a tokenizer")
    tokenizer_start = time.perf_counter()
    vocabulary = train_tokenizer(tokenizer, documents)
    tokenizer_seconds = time.perf_counter() - tokenizer_start

    recipe.write_text(RECIPE)
    builds = {}
    for name, overrides in (("mds", []), ("tar", ["output.path=tar", "output.format=wds"])):
        say(f"building the {name} dataset")
        builds[name] = build(recipe, overrides=overrides, progress=False).to_dict()

    say("verifying, tracing, auditing")
    proved = [
        proofs.prove_same_rows([mds, tar]),
        proofs.prove_intact([mds, tar]),
        proofs.prove_provenance(mds, output, tokenizer),
        proofs.prove_exactly_once(mds),
    ]
    say("training, killing, resuming")
    proved.append(proofs.prove_resume(mds, output / "training", vocabulary))
    say("timing the loader")
    loader = proofs.measure_loader(mds)
    report = DemoReport(
        output=output,
        seconds=time.perf_counter() - start,
        corpus=asdict(corpus),
        vocabulary=vocabulary,
        tokenizer_seconds=tokenizer_seconds,
        builds=builds,
        funnel=builds["mds"]["funnel"],
        loader=loader,
        proofs=tuple(proved),
    )
    (output / "report.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    return report


def clean_demo(output: Path) -> None:
    """Remove the files of the demo, and the folder if it is then empty."""
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
            raise ShardkitError(f"{output} contains files of something else; choose another --output")
        clean_demo(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).write_text("This folder was made by `shardkit demo`.\n")
