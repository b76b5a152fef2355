"""FlexAttention's block mask of a batch, from the bounds of its documents.

The mask is causal inside each document: token q sees token k if `start of q's document <= k <= q`. Padding at
a row's end is one more document. `create_block_mask` finds the blocks of this mask by evaluating it for every
pair of tokens. But documents are runs of tokens, so the start of q's document never decreases with q, and
three numbers say which blocks of keys the queries of block i see:

    first(i)   the block in which the document of its first token starts: no earlier block is seen
    full(i)    the first block that begins at or after the start of the document of its last token
    i          the block itself: always seen in part, because a query sees no later tokens

    first(i) … full(i) - 1 are seen in part, full(i) … i - 1 in full, i in part

first(i) and full(i) never decrease with i, so the blocks of queries that see a block of keys are ranges, too,
and all eight tables that the kernels read consist of ranges. The loader computes them with NumPy in time
proportional to the blocks (`block_tables`) and delivers them in the batch. `block_mask_of` makes a
`BlockMask` of them on the device where they are, without computation there. If the length of a sequence is
not a multiple of the block size, its last block is seen in part only, as in `create_block_mask`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import naming_extras

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask


DEFAULT_BLOCK = 128  # size of a block in tokens; FlexAttention's own default

_TABLES = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
)
BLOCK_MASK_FIELDS = (*_TABLES, "document_starts", "block_size")

_Ints = npt.NDArray[np.int64]
_Table = npt.NDArray[np.int32]


def block_tables(starts: _Ints, sequences: int, length: int, block: int) -> dict[str, _Table]:
    """Return the block tables of `sequences` sequences of `length` tokens, in blocks of `block` tokens.

    `starts`: offsets in the concatenated sequences at which documents begin; each sequence begins a document.
    Tables have the shape [sequences, 1, blocks] or [sequences, 1, blocks, blocks]. `document_starts` is
    [sequences, length]: for each token the offset in its sequence at which its document begins.
    """
    blocks = -(-length // block)
    own = np.arange(blocks)
    last_tokens = np.minimum((own + 1) * block, length) - 1
    in_sequence = starts % length
    firsts, fulls = (
        in_sequence[np.searchsorted(starts, tokens + np.arange(sequences)[:, None] * length, "right") - 1]
        for tokens in (own * block, last_tokens)
    )
    firsts, fulls = firsts // block, np.minimum(-(-fulls // block), own)
    if length % block:
        fulls[:, -1] = blocks - 1
    # One value per row of a table, in shape [sequences, 1, blocks, 1], to broadcast with column numbers.
    i, first, full, last, last_full = (
        np.broadcast_to(rows, (sequences, blocks)).astype(np.int32)[:, None, :, None]
        for rows in (own, firsts, fulls, _count_up_to(firsts) - 1, _count_up_to(fulls) - 1)
    )
    column = own.astype(np.int32)
    lengths = np.diff(starts, append=sequences * length)
    return {
        "kv_num_blocks": (full - first + 1)[..., 0],
        "kv_indices": np.where(column < full - first, first + column, i),
        "full_kv_num_blocks": (i - full)[..., 0],
        "full_kv_indices": np.minimum(full + column, i),
        "q_num_blocks": (last - last_full + 1)[..., 0],
        "q_indices": np.where(column == 0, i, np.minimum(last_full + column, blocks - 1)),
        "full_q_num_blocks": (last_full - i)[..., 0],
        "full_q_indices": np.minimum(i + 1 + column, blocks - 1),
        "document_starts": np.repeat(in_sequence.astype(np.int32), lengths).reshape(sequences, length),
    }


def _count_up_to(limits: _Ints) -> _Ints:
    """Return counts in the shape of `limits`: element [r, j] is how many of limits[r] are at most j."""
    sequences, blocks = limits.shape
    cells = (np.arange(sequences)[:, None] * blocks + limits).ravel()
    counts: _Ints = np.bincount(cells, minlength=sequences * blocks).reshape(sequences, blocks).cumsum(axis=1)
    return counts


def block_mask_of(batch: Mapping[str, Any]) -> BlockMask:
    """Return the `BlockMask` of a batch of a loader with `block_mask`, on the device of its tensors.

    For rows [batch size, length] it has one mask per row; for flat batches, one for all tokens. All heads
    share it. Raises KeyError if the fields of the option are missing or renamed.
    """
    with naming_extras("block_mask_of"):
        from torch.nn.attention.flex_attention import BlockMask
    if missing := [name for name in BLOCK_MASK_FIELDS if name not in batch]:
        raise KeyError(
            f"the batch has no {missing[0]!r}: give the loader layout=Layout(block_mask=True) and do not "
            "rename this field"
        )
    starts: torch.Tensor = batch["document_starts"]

    def causal_inside_documents(
        b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        return (kv_idx <= q_idx) & (kv_idx >= starts[b, q_idx])

    size, length = batch["block_size"], starts.shape[1]
    return BlockMask(
        seq_lengths=(length, length),
        **{name: batch[name] for name in _TABLES},
        BLOCK_SIZE=(size, size),
        mask_mod=causal_inside_documents,
    )
