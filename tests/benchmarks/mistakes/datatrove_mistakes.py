"""datatrove: its mistakes and tasks, with the PyTorch dataset that comes with it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from mistake_side import absent, cut, mistake, prepare, serve, task

absent(
    __name__,
    {
        "state_of_other_data": "its datasets have no state",
        "state_of_other_batch_size": "its datasets have no state",
        "resume": "no state of a loader",
        "stream": "no cache",
        "mix": "no mixtures",
    },
)


@prepare
def data() -> None:
    """Tokens of the texts, in rows of 17."""
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    ran(JsonlReader("texts"), DocumentTokenizer("data", "tokenizer.json", eos_token="<|endoftext|>"))


def ran(*steps: Any, **options: Any) -> None:
    from datatrove.executor import LocalPipelineExecutor

    LocalPipelineExecutor(list(steps), **({"workers": 1} | options)).run()


def loaded(folder: Any, sequence_length: Any = 16, **options: Any) -> list[Any]:
    """All samples, in order."""
    from datatrove.utils.dataset import DatatroveFolderDataset

    dataset = DatatroveFolderDataset(folder, sequence_length, **options)
    return [dataset[number] for number in range(len(dataset))]


def read(folder: str, **options: Any) -> None:
    """Read texts and write them again."""
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    ran(JsonlReader(folder, **options), JsonlWriter("new"))


@mistake(names="no/such")
def path_missing() -> None:
    read("no/such")


@mistake(names="empty")
def folder_empty() -> None:
    Path("empty").mkdir()
    read("empty")


@mistake(names="tables|rows.csv")
def folder_of_another_format() -> None:
    read("tables")


@mistake(names="shuffled.ds")
def shard_truncated() -> None:
    [file] = Path("data").glob("*.ds")
    cut(file)
    loaded("data", return_positions=True)


@mistake(names="ds.index")
def index_damaged() -> None:
    [file] = Path("data").glob("*.ds.index")
    cut(file)
    loaded("data", return_positions=True)


@mistake(names="text_kye")
def option_misspelled() -> None:
    read("texts", text_kye="text")


@mistake(names="seq_len")
def option_of_wrong_type() -> None:
    loaded("data", "16")


@mistake(names="batch_size")
def batch_size_zero() -> None:
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    ran(JsonlReader("texts"), DocumentTokenizer("new", "tokenizer.json", batch_size=0))


@mistake(names="seed")
def seed_negative() -> None:
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    ran(JsonlReader("texts"), DocumentTokenizer("new", "tokenizer.json", seed=-1))


@mistake(names="body")
def field_missing() -> None:
    read("texts", text_key="body")


@mistake(names="lighteval")
def package_missing() -> None:
    from datatrove.pipeline.decont import NGramsDecontIndexer

    NGramsDecontIndexer("new")


@mistake(names="zstdd")
def compression_unknown() -> None:
    read("texts", compression="zstdd")


@mistake(names="new")
def writing_unfinished() -> None:
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    Path("new").mkdir()
    file = TokenizedFile("new", "00000_unshuffled.ds")
    for number in range(64):
        file.write([number] * 17, None)
    file.tokens_file.flush()
    loaded("new", return_positions=True)


@mistake(names=r"\bdata\b")
def folder_not_empty() -> None:
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    ran(JsonlReader("texts", limit=1), DocumentTokenizer("data", "tokenizer.json"))


@mistake(names="meta")
def object_not_serializable() -> None:
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    def annotated(documents: Any, rank: int, world_size: int) -> Any:
        for document in documents:
            document.metadata["meta"] = threading.Lock()
            yield document

    ran(JsonlReader("texts"), annotated, JsonlWriter("new"))


@mistake(names="lock|filter")
def transform_not_picklable() -> str | None:
    from datatrove.pipeline.filters import LambdaFilter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    lock = threading.Lock()

    def kept(document: Any) -> bool:
        with lock:
            return "a" in document.text

    ran(JsonlReader("texts"), LambdaFilter(kept), JsonlWriter("new"), tasks=2, workers=2)
    return "runs" if any(Path("new").iterdir()) else None


@mistake(names="credentials")
def s3_without_credentials() -> None:
    read("s3://bucket/data")


@mistake(names="1000000")
def index_out_of_range() -> None:
    from datatrove.utils.dataset import DatatroveFolderDataset

    DatatroveFolderDataset("data", 16)[1000000]


@task()
def pack() -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer, DocumentTokenizerMerger

    tokenizer = DocumentTokenizer("tokens", "tokenizer.json", eos_token="<|endoftext|>", seed=17)
    LocalPipelineExecutor([JsonlReader("texts"), tokenizer], tasks=2, logging_dir="logs/tokens").run()
    merger = DocumentTokenizerMerger("tokens", "packed", save_filename="packed", seed=17)
    LocalPipelineExecutor([merger], tasks=1, logging_dir="logs/merge").run()


@task()
def inspect() -> None:
    from datatrove.utils.dataset import DatatroveFolderDataset

    print(DatatroveFolderDataset("data", 128)[3])


if __name__ == "__main__":
    serve()
