"""A small Llama of the blocks that `overweave bench block` times, and its tensor-parallel plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn.functional import cross_entropy

from overweave.block.cases import BlockSizes
from overweave.block.llama import Cache, TransformerBlock, styles


class Sizes(NamedTuple):
    """has_biases: query, key and value have some, as Qwen's have."""

    vocabulary: int = 64
    width: int = 32
    inner: int = 64
    heads: int = 8
    kv_heads: int = 4
    layers: int = 2
    has_biases: bool = False

    @property
    def of_block(self) -> BlockSizes:
        return BlockSizes(self.width, self.inner, self.heads, self.kv_heads)


class Llama(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(TransformerBlock(sizes.of_block) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        for layer in self._biased() if sizes.has_biases else ():
            layer.bias = nn.Parameter(torch.rand(layer.out_features) - 0.5)

    def _biased(self) -> list[Any]:
        return [getattr(block.attention, name) for block in self.blocks for name in "qkv"]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: `[batch, S]`. Returns logits."""
        return self.logits(self.through(self.embed(tokens)))

    def through(self, x: torch.Tensor, caches: Sequence[Cache] | None = None) -> torch.Tensor:
        """The blocks alone."""
        for index, block in enumerate(self.blocks):
            x = block(x, caches[index] if caches is not None else None)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """What stands behind the blocks."""
        found: torch.Tensor = self.head(self.norm(x))
        return found


def plan(layers: int, sequence: bool = True) -> dict[str, Any]:
    """The plan of torch's tutorials, with overweave's styles. sequence: ranks share out rows between blocks."""
    whole = Shard(1) if sequence else Replicate()
    found: dict[str, Any] = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=whole)}
    for index in range(layers):
        found |= {f"blocks.{index}.{name}": style for name, style in styles(sequence, by_overweave=True).items()}
    if sequence:
        found["norm"] = SequenceParallel(use_local_output=True)
    return found | {"head": ColwiseParallel(input_layouts=whole, output_layouts=Replicate())}


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
