"""A small decoder-only GPT: pre-norm blocks, rotary positions, tied embeddings. Copy it and change it.

Packed rows hold several documents. Given each token's document and its position there, attention stays inside
documents and positions start again at each; without them a row is one long text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "GPTConfig", "next_token_labels", "next_token_loss"]


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a model; `width` must be a multiple of twice the heads."""

    vocabulary: int
    layers: int = 4
    heads: int = 4
    width: int = 256


def next_token_labels(batch: Mapping[str, Tensor]) -> Tensor:
    """What follows each token but the last of its row, -100 where nothing is to be learnt: int64[B, L - 1].

    With `labels` and `document_ids` (options of the loader), that is padding and each document's first token.
    """
    return batch.get("labels", batch["tokens"])[:, 1:]


def next_token_loss(model: nn.Module, batch: Mapping[str, Tensor], scored: Tensor | None = None) -> Tensor:
    """Mean cross entropy of each token given those before it in its row, or in its document if known.

    `scored`: what to divide the sum by instead of this batch's own number of labels. Ranks that give the mean
    over all of them get gradients that, averaged, are those of the whole batch: documents and padding leave
    some ranks with fewer labels than others.
    """
    inputs, labels = batch["tokens"][:, :-1], next_token_labels(batch)
    if "document_ids" in batch:
        logits = model(inputs, batch["position_ids"][:, :-1], batch["document_ids"][:, :-1])
    else:
        logits = model(inputs)
    total = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return total / ((labels != -100).sum() if scored is None else scored)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [B, H, L, D]: each pair (x[i], x[i + D/2]) turns by its angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each on a normalised residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        fed: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + fed


class GPT(nn.Module):
    """tokens [B, L] (and each one's position and document) -> logits [B, L, vocabulary]."""

    frequencies: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        half = config.width // config.heads // 2
        self.register_buffer("frequencies", 10_000.0 ** -(torch.arange(half) / half), persistent=False)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):  # keeps the residual stream's variance independent of the depth
            for layer in (module.out, module.down):
                nn.init.normal_(layer.weight, std=0.02 / (2 * self.config.layers) ** 0.5)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        mask = None
        if documents is not None:
            mask = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]  # [B, 1, L, L]
        angles = positions[:, None, :, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return F.linear(self.norm(x), self.embedding.weight)
