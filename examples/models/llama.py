"""A Llama of ordinary `nn.Linear`s, with a static cache for keys and values, and the plans that make it parallel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn.functional import scaled_dot_product_attention, silu

import overweave as ow


class Sizes(NamedTuple):
    """Of a model. context: the most tokens of a sequence."""

    vocabulary: int = 128
    width: int = 64
    inner: int = 128
    heads: int = 8
    kv_heads: int = 4
    layers: int = 2
    context: int = 64


class Cache:
    """Keys and values of every position so far, of one layer: `[batch, heads, context, head]`, written in place."""

    def __init__(self, shape: tuple[int, ...], like: torch.Tensor) -> None:
        self.k, self.v = like.new_zeros(shape), like.new_zeros(shape)

    def extend(self, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, these at their positions included."""
        self.k.index_copy_(2, positions, k)
        self.v.index_copy_(2, positions, v)
        return self.k, self.v


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.width // sizes.heads
        self.q = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k = nn.Linear(sizes.width, self.head * sizes.kv_heads, bias=False)
        self.v = nn.Linear(sizes.width, self.head * sizes.kv_heads, bias=False)
        self.o = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.head)
        q, k, v = (layer(hidden_states).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotated(q, positions), rotated(k, positions)
        if cache is None:
            y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = cache.extend(k, v, positions)
            seen = torch.arange(k.shape[2], device=k.device) <= positions[:, None]
            y = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.up = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.attention, self.mlp = Attention(sizes), Mlp(sizes)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x), positions, cache)
        return x + self.mlp(self.norm_2(x))


class Llama(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor | None = None, caches: list[Cache] | None = None
    ) -> torch.Tensor:
        """tokens: `[batch, S]`, at these positions. Returns logits `[batch, S, vocabulary]`."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x, positions, None if caches is None else caches[index])
        return self.head(self.norm(x))


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `[batch, heads, S, head]`."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def training_plan(layers: int) -> dict[str, Any]:
    """Sequence parallelism: between blocks each rank has its part of the sequence."""
    found: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for index in range(layers):
        block = {
            "norm_1": SequenceParallel(use_local_output=True),
            "attention": ow.PrepareGather(input_layouts=Shard(1)),
            "attention.q": ow.Colwise(),
            "attention.k": ow.Colwise(),
            "attention.v": ow.Colwise(),
            "attention.o": ow.Rowwise(output_layouts=Shard(1)),
            "norm_2": SequenceParallel(use_local_output=True),
            "mlp": ow.PrepareGather(input_layouts=Shard(1)),
            "mlp.gate": ow.Colwise(),
            "mlp.up": ow.Colwise(),
            "mlp.down": ow.Rowwise(output_layouts=Shard(1)),
        }
        found |= {f"blocks.{index}.{name}": style for name, style in block.items()}
    return found


def decoding_plan(layers: int) -> dict[str, Any]:
    """Every rank has every token: each half of a block ends in one `matmul_all_reduce`."""
    columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    found: dict[str, Any] = {}
    for index in range(layers):
        found |= {f"blocks.{index}.{name}": ow.Colwise() for name in columns}
        found |= {f"blocks.{index}.{name}": ow.Rowwise() for name in ("attention.o", "mlp.down")}
    return found
