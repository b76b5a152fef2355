"""Models of each type that KenLM has, of one small text, and the scores that KenLM gives sentences with them.

`python tests/golden/kenlm/make.py BIN` made the files beside it, once: BIN is the folder with lmplz and
build_binary of KenLM (github.com/kpu/kenlm, commit 4cb443e, built with cmake), and the package kenlm 0.3.0 of
PyPI scored. `scores.json` has the sentences and, for each file, the sum of log10 probabilities of each.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
WORDS = [
    *("the", "a", "cat", "dog", "sat", "ran", "on", "in", "mat", "house", "and"),
    *("größe", "中文", "über", "ünïcode_word_longer_than_sixteen_bytes", "it"),
]
SENTENCES = [
    "the cat sat on the mat",
    "a dog ran in the house and sat on it",
    "zebra",
    "the zebra sat on the",
    "größe 中文 über ünïcode_word_longer_than_sixteen_bytes it it it",
    "on on on on on on on on on on",
    "<unk> cat <s> the </s>",
]
TYPES = {
    "probing": ["probing"],
    "tight": ["-p", "1.05", "probing"],
    "trie": ["trie"],
    "trie-a": ["-a", "22", "trie"],
    "trie-q": ["-q", "5", "-b", "4", "trie"],
    "trie-qa": ["-q", "4", "-a", "3", "trie"],
    "wordless": ["-v", "probing"],
}


def training_lines() -> list[str]:
    """Return the text, a sentence a line."""
    rng = random.Random(7)
    sizes = range(len(WORDS), 0, -1)
    lines = [" ".join(rng.choices(WORDS, sizes, k=rng.randint(1, 9))) for _ in range(31)]
    return [*lines, *SENTENCES[:2]]


def main(programs: Path) -> None:
    import kenlm

    text = "\n".join(training_lines()) + "\n"
    for order in range(1, 7):
        command = [str(programs / "lmplz"), "-o", str(order), "--discount_fallback", "-S", "64M"]
        done = subprocess.run(command, input=text.encode(), capture_output=True, check=True)
        (FOLDER / f"{order}.arpa").write_bytes(done.stdout)
    arpa = (FOLDER / "3.arpa").read_text()
    (FOLDER / "no-unk.arpa").write_text(without(arpa, ["<unk>"], "1"))
    deep = (FOLDER / "6.arpa").read_text()
    (FOLDER / "pruned.arpa").write_text(pruned(deep))
    for name, options in TYPES.items():
        build(programs, options, "3.arpa", f"3.{name}")
    build(programs, ["-r", f"{FOLDER}/1.arpa {FOLDER}/2.arpa", "probing"], "3.arpa", "3.rest")
    for stem in ("2", "6", "no-unk", "pruned"):
        build(programs, ["probing"], f"{stem}.arpa", f"{stem}.probing")
        build(programs, ["trie"], f"{stem}.arpa", f"{stem}.trie")
    for stem in ("2", "4", "5", "6"):
        build(programs, TYPES["trie-qa"], f"{stem}.arpa", f"{stem}.trie-qa")
    for stem in ("1", "6"):  # pruned.arpa is what is left of the latter
        (FOLDER / f"{stem}.arpa").unlink()
    names = sorted(
        path.name for path in FOLDER.iterdir() if path.suffix not in (".py", ".json") and path.is_file()
    )
    scores = {name: [kenlm.Model(str(FOLDER / name)).score(one) for one in SENTENCES] for name in names}
    facts = {"sentences": SENTENCES, "scores": scores}
    (FOLDER / "scores.json").write_text(json.dumps(facts, ensure_ascii=False, indent=1) + "\n")


def build(programs: Path, options: list[str], source: str, target: str) -> None:
    command = [str(programs / "build_binary"), *options, str(FOLDER / source), str(FOLDER / target)]
    subprocess.run(command, capture_output=True, check=True)


def without(arpa: str, words: list[str], order: str) -> str:
    """Remove some n-grams of an order from an ARPA file."""
    kept, removed, section = [], 0, ""
    for line in arpa.splitlines():
        section = line if line.startswith("\\") else section
        if section == f"\\{order}-grams:" and "\t" in line and line.split("\t")[1] in words:
            removed += 1
        else:
            kept.append(line)
    head = next(line for line in kept if line.startswith(f"ngram {order}="))
    kept[kept.index(head)] = f"ngram {order}={int(head.partition('=')[2]) - removed}"
    return "\n".join(kept) + "\n"


def pruned(arpa: str) -> str:
    """Remove n-grams of 2 to 4 words that longer ones end with, but none begins with."""
    for order in (4, 3, 2):
        longer, section = [], ""
        for line in arpa.splitlines():
            section = line if line.startswith("\\") else section
            if section == f"\\{order + 1}-grams:" and "\t" in line:
                longer.append(line.split("\t")[1].split(" "))
        contexts = {tuple(words[:-1]) for words in longer}
        ends = sorted({tuple(words[1:]) for words in longer} - contexts)
        arpa = without(arpa, [" ".join(words) for words in ends[::2]], str(order))
    return arpa


if __name__ == "__main__":
    main(Path(sys.argv[1]))
