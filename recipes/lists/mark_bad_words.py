"""A step of recipes/toxicity.yaml: counts the listed words of each document in the field `bad_words`."""

import re
from pathlib import Path


class MarkBadWords:
    """`words` is a file with one word or phrase per line."""

    def __init__(self, words):
        listed = [
            line.strip() for line in Path(words).read_text(encoding="utf-8").splitlines() if line.strip()
        ]
        longest_first = sorted(map(re.escape, listed), key=len, reverse=True)
        self.pattern = re.compile(rf"\b(?:{'|'.join(longest_first)})\b", re.IGNORECASE)

    def __call__(self, document):
        document.metadata["bad_words"] = len(self.pattern.findall(document.text))
        return True
