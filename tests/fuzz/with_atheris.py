"""A target under Atheris, libFuzzer's mutations with coverage of the bytecode, where that is installed:

    cd tests && PYTHONPATH=.. python -m fuzz.with_atheris TARGET CORPUS_FOLDER [options of libFuzzer]

One file of the target is hostile, the first of those that are mutated; `-max_total_time=3600` ends a run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

from fuzz.engine import written

with atheris.instrument_imports(include=["shardkit"]):
    from fuzz.targets import target
    from shardkit.errors import ShardkitError


def main(name: str, corpus: str, *options: str) -> None:
    """Fuzz a target from its sound file on; what ends in another error is written by libFuzzer."""
    made = target(name)
    hostile = made.chosen[0]
    Path(corpus).mkdir(parents=True, exist_ok=True)
    (Path(corpus) / "sound").write_bytes(made.files[hostile])

    def read(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as place:
            written({**made.files, hostile: data if made.repair is None else made.repair(data)}, Path(place))
            try:
                made.read(Path(place))
            except ShardkitError:
                return

    atheris.Setup([sys.argv[0], corpus, *options], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
