"""Run the commands of the tutorial, docs/guides/tutorial.md, and record what they give for its figure.

    python docs/tutorial.py FOLDER                    # in a new folder; then draw: python docs/figures.py
    python docs/tutorial.py FOLDER --only sample.py   # again, where only this command or its file has changed

Files that the page says to save are saved, and its commands run in their order. docs/figures/tutorial.json
gets the losses, and the seconds and the output of each command. The training has one thread. A test compares
the page with this file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "guides" / "tutorial.md"
RECORD = DOCS / "figures" / "tutorial.json"

_FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def run(folder: Path, replaced: Mapping[str, str], only: str = "") -> Iterator[tuple[str, float, str]]:
    """Yield each command of the page with `only` in it, its seconds and its output.

    `replaced`: other words for some of the page's.
    """
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(DOCS.parent / "examples")
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    known = [str(DOCS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PATH": os.pathsep.join(paths), "PYTHONPATH": os.pathsep.join(known), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    for language, title, text in _FENCE.findall(PAGE.read_text()):
        if title:
            (folder / title).write_text(text)
        elif language == "bash":
            for command in text.replace("\\\n", "").splitlines():
                for words, others in replaced.items():
                    command = command.replace(words, others)
                if only not in command:
                    continue
                start = time.perf_counter()
                done = subprocess.run(
                    command, shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True,
                    check=True,
                )  # fmt: skip
                yield " ".join(command.split()), round(time.perf_counter() - start, 1), done.stdout


def losses(folder: Path) -> list[float]:
    """Return the loss of each step of the run in `folder`."""
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [round(json.loads(line)["loss"], 4) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder to work in")
    parser.add_argument("--only", default="", help="run the commands with this word (default: all)")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=bool(arguments.only))
    known = json.loads(RECORD.read_text())["commands"] if arguments.only else []
    for command, seconds, output in run(arguments.folder, {}, arguments.only):
        sys.stdout.write(f"$ {command}\n{output}({seconds} s)\n")
        known = [one for one in known if one["command"] != command]
        known.append({"command": command, "seconds": seconds, "output": output})
    facts = {"losses": losses(arguments.folder), "commands": known}
    RECORD.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
