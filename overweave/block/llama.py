"""A Llama block of ordinary `nn.Linear`s, and the plans of `parallelize_module` that shard it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn.functional import scaled_dot_product_attention, silu

from overweave.adapters.parallel.styles import Colwise, PrepareGather, Rowwise
from overweave.block.cases import BlockSizes

COLUMNS = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
ROWS = ("attention.o", "mlp.down")


class Cache(NamedTuple):
    """Keys and values, `[sequences, heads, context, head]`, and the positions that are written next, in place. is_full:
    the position is the last one, and all are read; else only those up to it."""

    k: torch.Tensor
    v: torch.Tensor
    position: torch.Tensor
    is_full: bool = True


class Attention(nn.Module):
    """Grouped-query attention with rotary embedding: of whole sequences, or of one token of each with a KV cache."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.head = sizes.head
        self.q = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k = nn.Linear(sizes.width, sizes.head * sizes.kv_heads, bias=False)
        self.v = nn.Linear(sizes.width, sizes.head * sizes.kv_heads, bias=False)
        self.o = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """x: `[sequences, length, width]`."""
        shape = (*x.shape[:-1], -1, self.head)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        positions = torch.arange(q.shape[2], device=q.device) if cache is None else cache.position
        q, k = rotary_embedding(q, positions), rotary_embedding(k, positions)
        if cache is None:
            y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = cache.k.index_copy_(2, positions, k), cache.v.index_copy_(2, positions, v)
            seen = None if cache.is_full else torch.arange(k.shape[2], device=k.device) <= positions[:, None]
            y = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        result: torch.Tensor = self.o(y.transpose(1, 2).flatten(-2))
        return result


class Mlp(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.up = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: `[..., width]`."""
        result: torch.Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return result


class TransformerBlock(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.attention, self.mlp = Attention(sizes), Mlp(sizes)

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """x: `[sequences, length, width]`, or this rank's part of the length."""
        x = x + self.attention(self.norm_1(x), cache=cache)
        result: torch.Tensor = x + self.mlp(self.norm_2(x))
        return result


def rotary_embedding(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the rotary embedding of `[sequences, heads, length, head]`."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def styles(is_split: bool, by_overweave: bool) -> dict[str, ParallelStyle]:
    """Return a plan for `parallelize_module`. is_split: sequences are sharded between blocks; else replicated.
    by_overweave: overweave's styles in place of torch's of the same meaning."""
    columns, rows = (Colwise, Rowwise) if by_overweave else (ColwiseParallel, RowwiseParallel)
    whole = Shard(1) if is_split else Replicate()
    plan: dict[str, ParallelStyle] = {name: columns() for name in COLUMNS}
    plan |= {name: rows(output_layouts=whole) for name in ROWS}
    if is_split:
        plan |= {name: SequenceParallel(use_local_output=True) for name in ("norm_1", "norm_2")}
        for name in ("attention", "mlp"):
            prepared = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
            )
            plan[name] = PrepareGather(input_layouts=Shard(1)) if by_overweave else prepared
    return plan
