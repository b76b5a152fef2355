"""Flat files of token ids in the formats of Megatron, llm.c, nanoGPT, OLMo and NumPy."""

from shardkit.formats.tokens.headers import HEAD_BYTES, MegatronIndex, read_header, refuse_two_kinds
from shardkit.formats.tokens.shard import Piece, TokenShard, map_piece, name_of, open_shard, pieces_of
from shardkit.formats.tokens.trainer_files import TokenStream, write_token_files

__all__ = [
    "HEAD_BYTES",
    "MegatronIndex",
    "Piece",
    "TokenShard",
    "TokenStream",
    "map_piece",
    "name_of",
    "open_shard",
    "pieces_of",
    "read_header",
    "refuse_two_kinds",
    "write_token_files",
]
