"""Fill-in-the-middle: documents whose middle is moved to their end, so that models learn to fill gaps.

A document is cut at two of its characters into prefix, middle and suffix (Bavarian et al. 2022, arXiv
2207.14255), and written in one of two orders, with special tokens P, M and S before its parts:

    PSM    P prefix S suffix M middle
    SPM    P S suffix M prefix middle      (as StarCoder and Megatron write it)

Which documents are cut, where, and in which order their parts are written are functions of (seed, document
id). Each part is tokenized separately, so `original` can restore the text with any tokenizer. A title
(groups.py) is a separate part before P.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.hashing import keyed_hashes
from shardkit.tokens.tokenizer import Encoder, EncodingError, Tokens
from shardkit.writers.recipe.inputs import FimConfig

Cuts = npt.NDArray[np.int64]
_WHOLE = float(1 << 64)


def cut_documents(document_ids: list[bytes], seed: int, config: FimConfig) -> Cuts:
    """Return int64[n, 3], for each document its order and the places of two cuts.

    The order is 0 for an uncut document, 1 for PSM, 2 for SPM. A place is a fraction of the text, times 2^63.
    """
    drawn, order, first, second = (
        keyed_hashes(document_ids, seed, f"fim-{what}") for what in ("draw", "order", "first", "second")
    )
    cuts = np.zeros((len(document_ids), 3), np.int64)
    cuts[:, 0] = drawn < config.rate * _WHOLE
    cuts[:, 0] += cuts[:, 0] & (order < config.spm_rate * _WHOLE)
    cuts[:, 1], cuts[:, 2] = first >> np.uint64(1), second >> np.uint64(1)
    return cuts


def ordered(text: str, cut: npt.NDArray[np.int64]) -> tuple[str, str, str]:
    """Return (prefix, middle, suffix) of a text, given its row of `cut_documents`; cuts are uniform."""
    places = sorted((int(value) * (len(text) + 1)) >> 63 for value in cut[1:])
    return text[: places[0]], text[places[0] : places[1]], text[places[1] :]


def original(parts: tuple[str, str, str]) -> str:
    """Return the original text of a document from the texts that follow P, S and M.

    PSM writes (prefix, suffix, middle); SPM writes ("", suffix, prefix + middle).
    """
    prefix, suffix, middle = parts
    return prefix + middle + suffix


def encode_fim(
    encoder: Encoder, fim: FimConfig, seed: int, documents: pa.RecordBatch, heads: Sequence[str]
) -> tuple[Tokens, npt.NDArray[np.int64]]:
    """Encode documents, some of them rearranged; return all ids and the number of ids per document.

    `heads` has a text per document that is put before it and never cut. EncodingError has the document's row.
    """
    prefix_id, middle_id, suffix_id = (encoder.special_id(token, "fim") for token in fim.tokens)
    cuts = cut_documents(documents.column("document_id").to_pylist(), seed, fim)
    texts: list[str] = []
    owners: list[int] = []
    is_cut = np.zeros(documents.num_rows, np.bool_)
    for row, (head, text) in enumerate(zip(heads, documents.column("text").to_pylist(), strict=True)):
        is_cut[row] = bool(cuts[row, 0] and text)
        parts = (*([head] if head else []), *ordered(text, cuts[row])) if is_cut[row] else (head + text,)
        texts += parts
        owners += [row] * len(parts)
    try:
        ids, lengths = encoder.encode(texts)
    except EncodingError as error:
        raise type(error)(str(error), owners[error.row]) from error
    pieces = iter(np.split(ids, np.cumsum(lengths)[:-1]))
    marks = [np.array([one], encoder.dtype) for one in (prefix_id, middle_id, suffix_id)]
    made: list[Tokens] = []
    for row in range(documents.num_rows):
        if not is_cut[row]:
            made.append(next(pieces))
            continue
        first = next(pieces) if heads[row] else np.zeros(0, encoder.dtype)
        prefix, middle, suffix = next(pieces), next(pieces), next(pieces)
        if cuts[row, 0] == 1:
            order = (first, marks[0], prefix, marks[2], suffix, marks[1], middle)
        else:
            order = (first, marks[0], marks[2], suffix, marks[1], prefix, middle)
        made.append(np.concatenate(order))
    counts = np.fromiter(map(len, made), np.int64, len(made))
    return np.concatenate([np.zeros(0, encoder.dtype), *made]), counts
