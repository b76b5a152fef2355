"""Files of whole documents as token ids, with the bytes that the tools of other trainers write.

    format     files of number N                  ids                                    who reads them
    megatron   tokens-N.bin, tokens-N.idx         uint16 below 65,500 ids, else int32    Megatron-LM, NeMo
    olmo       tokens-N.npy, tokens-N.csv.gz,     least of uint8, uint16, uint32         OLMo-core, OLMo
               labels_mask-N.npy with masks
    nanogpt    tokens-N.bin                       uint16                                 nanoGPT
    llmc       tokens-N.bin                       uint16, above 65,536 ids uint32        llm.c, modded-nanogpt
    datatrove  tokens-N.ds, .ds.index,            uint16, above 65,536 ids uint32        datatrove, nanotron
               .ds.metadata, .ds.loss with masks

A file is one stream: each document follows the one before it and ends in eos. The numbers are little-endian.
The headers are in `shardkit.formats.tokens.headers`. What each tool writes was read in its source:

    megatron   IndexedDatasetBuilder and DType.optimal_dtype of megatron/core/datasets/indexed_dataset.py: a
               document is one sequence, the marks of documents begin with 0
    olmo       write_document_indices of src/olmo_core/data/utils.py (lines "start,end", in tokens) and
               get_dtype of numpy_dataset.py. Ids and masks (1 byte per token) have no NumPy header, although
               their names end in .npy; the masks are named as open-instruct names them
    nanogpt    data/openwebtext/prepare.py
    llmc       write_datafile of dev/data/data_common.py, and of data/fineweb.py in modded-nanogpt
    datatrove  TokenizedFile of src/datatrove/pipeline/tokens/tokenizer.py: ends of documents in tokens, as
               u64; metadata "tokenizer|bytes per token", number of tokens, and this number for people to
               read; a loss mask of 1 byte per token. token_size of utils/tokenization.py

In a dataset, each file of ids is a shard with one row: a stream of documents. The module trainer_files of
`shardkit.formats.tokens` writes and reads the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from shardkit.errors import ShardError
from shardkit.manifest import TOKENS, Column, FileInfo, ShardInfo

LLMC_HEADER_BYTES = 1024
MAX_FILE_TOKENS = (1 << 31) - 1  # llm.c's header and provenance tables have int32 numbers of tokens


@dataclass(frozen=True, slots=True)
class TrainerFormat:
    """The files of a format. `names` maps the ending of each file to its name, which has `{}` for the number.

    The first file has the ids. `mask` is the ending of the file that only datasets with loss masks have.
    """

    trainer: str
    names: dict[str, str]
    mask: str | None = None

    def endings(self, *, masked: bool) -> list[str]:
        """Return the endings of the files of one number, that with the ids first."""
        return [ending for ending in self.names if masked or ending != self.mask]


TRAINER_FORMATS = {
    "megatron": TrainerFormat("Megatron-LM", {"bin": "tokens-{}.bin", "idx": "tokens-{}.idx"}),
    "olmo": TrainerFormat(
        "OLMo-core",
        {"npy": "tokens-{}.npy", "csv.gz": "tokens-{}.csv.gz", "mask.npy": "labels_mask-{}.npy"},
        "mask.npy",
    ),
    "nanogpt": TrainerFormat("nanoGPT", {"bin": "tokens-{}.bin"}),
    "llmc": TrainerFormat("llm.c", {"bin": "tokens-{}.bin"}),
    "datatrove": TrainerFormat(
        "datatrove",
        {
            "ds": "tokens-{}.ds",
            "ds.index": "tokens-{}.ds.index",
            "ds.metadata": "tokens-{}.ds.metadata",
            "ds.loss": "tokens-{}.ds.loss",
        },
        "ds.loss",
    ),
}


def trainer_dtype(kind: str, vocab_size: int) -> np.dtype[Any]:
    """Return the dtype of ids below `vocab_size` in files of format `kind`, as the trainer's tool chooses it.

    Raises ValueError if the format cannot store such ids.
    """
    if kind == "megatron":
        return np.dtype("<u2" if vocab_size < 65500 else "<i4")
    if kind == "olmo" and vocab_size <= 1 << 8:
        return np.dtype("u1")
    if vocab_size <= 1 << 16:
        return np.dtype("<u2")
    if kind == "nanogpt":
        raise ValueError(
            f"nanoGPT's files store ids below 65,536, but the tokenizer has {vocab_size:,}; use llmc or olmo"
        )
    return np.dtype("<u4")


def stream_info(kind: str, dtype: np.dtype[Any], file: FileInfo) -> ShardInfo:
    """Describe a file of ids of format `kind` for a manifest. Raises ShardError for an impossible size."""
    count_tokens(kind, dtype, file.basename, file.bytes)
    return ShardInfo(file, 1, (Column(TOKENS, f"ndarray:{dtype.name}"),))


def dtype_of_stream(info: ShardInfo) -> np.dtype[Any]:
    """Return the dtype of the ids in a file that `stream_info` described."""
    return np.dtype(info.columns[0].encoding.rpartition(":")[2]).newbyteorder("<")


def count_tokens(kind: str, dtype: np.dtype[Any], where: str | PathLike[str], size: int) -> int:
    """Return the number of ids in a file of `size` bytes. Raises ShardError unless it is a whole number."""
    count, rest = divmod(size - start_of(kind), dtype.itemsize)
    if rest or count < 0:
        raise ShardError(where, f"has {size:,} bytes, which is no whole number of {dtype.name} ids")
    return count


def start_of(kind: str) -> int:
    """Return the size of the header of files of format `kind`, in bytes."""
    return LLMC_HEADER_BYTES if kind == "llmc" else 0
