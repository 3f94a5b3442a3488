"""torchtitan's projections with overlapped collectives, as overrides of its `dist_gemm` modules.

    torchtitan ... --override.imports overweave.adapters.torchtitan.qkv,overweave.adapters.torchtitan.row_parallel,\
overweave.adapters.torchtitan.feed_forward

for a model whose configuration says `tp_gemm_backend="dist_gemm"`, with sequence parallelism. Sequences are gathered
and scattered along their own dimension, and SwiGLU is one operator. Parameters, their sharding and checkpoints are
torchtitan's. Without these overrides, `overweave.install()` replaces the operators that `dist_gemm` calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from overweave.adapters.packages import names_of, obstacle_of
from overweave.functional import all_gather_linear, linear_reduce_scatter

with names_of("torchtitan"):
    import spmd_types
    from torchtitan.config import derive, override
    from torchtitan.models.common import dist_gemm as stock


class Qkv(stock.AllGatherFusedQKVLinear):  # type: ignore[misc]  # torchtitan is not installed with it
    """The q, k and v projection; the all-gather of rows overlaps with the matmul."""

    @dataclass(kw_only=True, slots=True)
    class Config(stock.AllGatherFusedQKVLinear.Config):  # type: ignore[misc]
        """The configuration of torchtitan's module."""

    def forward(self, x: torch.Tensor) -> Any:
        """Project `[B, S/W, h]` to q, k and v, each `[B, S, heads, d]`, contiguous."""
        group = _group(self.wqkv.weight)
        if group is None:
            return super().forward(x)
        qkv = all_gather_linear(x, self.wqkv.weight, self.wqkv.bias, group, dim=1, save="columns")
        heads = qkv.view(*qkv.shape[:2], -1, self.r_dim, self.head_dim)
        parts = torch.split(heads, [self.heads_per_kv, 1, 1], dim=-2)
        return tuple(part.reshape(*qkv.shape[:2], -1, self.head_dim).contiguous() for part in parts)


class RowParallel(stock.RowParallelLinear):  # type: ignore[misc]
    """The output projection; the reduce-scatter overlaps with the matmul."""

    @dataclass(kw_only=True, slots=True)
    class Config(stock.RowParallelLinear.Config):  # type: ignore[misc]
        """The configuration of torchtitan's module."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Project `[B, S, h/W]` to `[B, S/W, h]`."""
        group = _group(self.weight)
        if group is None:
            result: torch.Tensor = super().forward(input)
            return result
        return linear_reduce_scatter(input, self.weight, self.bias, group, dim=1)


class FeedForward(stock.AllGatherFusedFeedForward):  # type: ignore[misc]
    """The SwiGLU MLP; its all-gather and its reduce-scatter overlap with the matmuls."""

    @dataclass(kw_only=True, slots=True)
    class Config(stock.AllGatherFusedFeedForward.Config):  # type: ignore[misc]
        """The configuration of torchtitan's module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute `[B, S/W, h]` -> `[B, S/W, h]`."""
        group = _group(self.w1.weight)
        if group is None:
            result: torch.Tensor = super().forward(x)
            return result
        gate = self.w1.weight
        hidden = all_gather_linear(x, self.w3.weight, None, group, dim=1, gate=gate, activation="silu", save="columns")
        return linear_reduce_scatter(hidden, self.w2.weight, self.w2.bias, group, dim=1)


@override(target=stock.AllGatherFusedQKVLinear.Config, exact=True, description="overweave: gather beside q, k, v")  # type: ignore[untyped-decorator]
def qkv(config: Any) -> Any:
    """Return the configuration for overweave's q, k, v projection."""
    return derive(config, Qkv.Config)


@override(target=stock.RowParallelLinear.Config, exact=True, description="overweave: scatter beside the projection")  # type: ignore[untyped-decorator]
def row_parallel(config: Any) -> Any:
    """Return the configuration for overweave's output projection."""
    return derive(config, RowParallel.Config)


@override(target=stock.AllGatherFusedFeedForward.Config, exact=True, description="overweave: SwiGLU")  # type: ignore[untyped-decorator]
def feed_forward(config: Any) -> Any:
    """Return the configuration for overweave's feed-forward layer."""
    return derive(config, FeedForward.Config)


def _group(weight: torch.Tensor) -> Any:
    """Return the tensor-parallel group; None if torchtitan's forward should run: one rank, type checking, or a weight
    that overweave does not support."""
    return None if spmd_types.is_type_checking() or obstacle_of(weight) else stock._tp_group_from_context()
