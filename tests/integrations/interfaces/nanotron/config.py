"""Configurations of models, of which one kind takes positions."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LlamaConfig", "Qwen2Config"]


@dataclass
class LlamaConfig:
    vocab_size: int = 32000


@dataclass
class Qwen2Config:
    vocab_size: int = 32000
    _use_doc_masking: bool = False
