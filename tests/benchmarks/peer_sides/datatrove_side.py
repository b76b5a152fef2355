"""datatrove: its signature stage without its files, its own filters on its own documents, and a whole build.

Nearly all of the time of signatures is spaCy's word splitting; filters get words by str.split, or by their
default splitter, which is spaCy too.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from peer_side import BANDS, FILTERS, NGRAM, ROWS, Request, measured, serve, texts_of, write_jsonl

TASKS = 8  # as many as files


class WordsBySpaces:
    """In place of a word tokenizer."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()


@cache
def stage(permutations: int) -> Any:
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
    from datatrove.utils.hashing import HashConfig

    config = MinhashConfig(
        n_grams=NGRAM,
        num_buckets=permutations // ROWS,
        hashes_per_bucket=ROWS,
        hash_config=HashConfig(precision=32, hash_fc="xxhash"),
    )
    return MinhashDedupSignature(tempfile.gettempdir(), config)


def signatures(table: pa.Table, request: Request) -> int:
    made = stage(request["permutations"])
    done = 0
    for text in texts_of(table):
        shingles = made.get_shingles(text)
        done += shingles.size != 0 and len(made.get_signature(shingles)) > 0
    return done


def split(text: str, language: str) -> list[str]:
    return text.split()


@cache
def filters(task: str, words: str) -> list[Any]:
    from datatrove.pipeline import filters as made
    from datatrove.pipeline.filters import (
        fineweb_quality_filter,
        gopher_quality_filter,
        gopher_repetition_filter,
    )

    if words == "split":
        for module in (gopher_repetition_filter, gopher_quality_filter, fineweb_quality_filter):
            module.split_into_words = split
    gopher = [made.GopherRepetitionFilter(), made.GopherQualityFilter()]
    web = [made.C4QualityFilter(filter_no_terminal_punct=False), made.FineWebQualityFilter()]
    return {"repetition": gopher[:1], "gopher": gopher, "fineweb": [*gopher, *web]}[task]


def passing(table: pa.Table, request: Request) -> int:
    """Number of documents that pass."""
    from datatrove.data import Document

    steps = filters(request["task"], request["words"])
    kept = 0
    for text in texts_of(table):
        document = Document(text=text, id="x")  # C4's filter writes its edited text into it
        kept += all(step.filter(document) is True for step in steps)
    return kept


def build(table: pa.Table, request: Request) -> dict[str, Any]:
    """Its example for FineWeb from the filters on, then shuffled tokens: what was kept, and of how many."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline import filters as made
    from datatrove.pipeline.dedup import minhash
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer, DocumentTokenizerMerger
    from datatrove.pipeline.writers import JsonlWriter

    texts = write_jsonl(table)
    config = minhash.MinhashConfig(n_grams=NGRAM, num_buckets=BANDS, hashes_per_bucket=ROWS)
    language = made.LanguageFilter("en")
    language.model.MODEL_URL = request["lid"]
    sign = minhash.MinhashDedupSignature
    with tempfile.TemporaryDirectory() as folder, measured() as usage:

        def run(number: int, steps: list[Any], tasks: int = TASKS) -> None:
            method = (
                "fork" if request["words"] == "split" else "forkserver"
            )  # a fork has the words that are set
            LocalPipelineExecutor(
                steps,
                tasks=tasks,
                workers=request["workers"],
                logging_dir=f"{folder}/logs-{number}",
                start_method=method,
            ).run()

        signing = sign(f"{folder}/signatures", config)
        if request["words"] == "split":
            sign.word_tokenizer = WordsBySpaces()
        rules = [*filters("gopher", request["words"]), *filters("fineweb", request["words"])[2:]]
        clean = JsonlWriter(f"{folder}/clean", compression=None)
        run(1, [JsonlReader(str(texts)), language, *rules, clean])
        run(2, [JsonlReader(f"{folder}/clean"), signing])
        run(
            3,
            [minhash.MinhashDedupBuckets(f"{folder}/signatures", f"{folder}/buckets", config=config)],
            BANDS,
        )
        run(4, [minhash.MinhashDedupCluster(f"{folder}/buckets", f"{folder}/remove", config=config)], 1)
        kept = JsonlWriter(f"{folder}/kept", compression=None)
        run(5, [JsonlReader(f"{folder}/clean"), minhash.MinhashDedupFilter(f"{folder}/remove"), kept])
        tokens = f"{folder}/tokens"
        encode = DocumentTokenizer(tokens, request["tokenizer"], eos_token=request["eos"], seed=1)
        run(6, [JsonlReader(f"{folder}/kept"), encode])
        run(7, [DocumentTokenizerMerger(tokens, f"{folder}/merged", "merged", seed=1)], 1)
        ends = sum(file.stat().st_size // 8 for file in Path(folder, "merged").glob("*.ds.index"))
        size = sum(file.stat().st_size for file in Path(folder, "merged").glob("*.ds"))
    return {"tokens": size // 2, "documents": ends, "usage": usage}


if __name__ == "__main__":
    tasks = {"signatures": signatures, "build": build, **dict.fromkeys(FILTERS, passing)}
    serve(tasks, lambda table: table)
