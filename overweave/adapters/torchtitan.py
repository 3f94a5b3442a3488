"""torchtitan's projections with overlapped collectives, as overrides of its `dist_gemm` modules.

    torchtitan ... --override.imports overweave.adapters.torchtitan.qkv,overweave.adapters.torchtitan.row_parallel,\
overweave.adapters.torchtitan.feed_forward

of a model whose configuration says `tp_gemm_backend="dist_gemm"`, with sequence parallelism. Sequences are gathered and
scattered along their own dimension, and SwiGLU is one operator. Parameters, their sharding and checkpoints are
torchtitan's. `overweave.install()` without these overrides puts overweave behind the operators that `dist_gemm` calls.
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
    """q, k and v of all rows; rows are gathered while they are multiplied."""

    @dataclass(kw_only=True, slots=True)
    class Config(stock.AllGatherFusedQKVLinear.Config):  # type: ignore[misc]
        """torchtitan's."""

    def forward(self, x: torch.Tensor) -> Any:
        """`[B, S/W, h]` to q, k and v, each `[B, S, heads, d]`, contiguous."""
        group = _group(self.wqkv.weight)
        if group is None:
            return super().forward(x)
        qkv = all_gather_linear(x, self.wqkv.weight, self.wqkv.bias, group, dim=1, save="columns")
        heads = qkv.view(*qkv.shape[:2], -1, self.r_dim, self.head_dim)
        parts = torch.split(heads, [self.heads_per_kv, 1, 1], dim=-2)
        return tuple(part.reshape(*qkv.shape[:2], -1, self.head_dim).contiguous() for part in parts)


class RowParallel(stock.RowParallelLinear):  # type: ignore[misc]
    """An output projection whose sum over ranks is scattered while it is computed."""

    @dataclass(kw_only=True, slots=True)
    class Config(stock.RowParallelLinear.Config):  # type: ignore[misc]
        """torchtitan's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[B, S, h/W]` to `[B, S/W, h]`."""
        group = _group(self.weight)
        if group is None:
            result: torch.Tensor = super().forward(input)
            return result
        return linear_reduce_scatter(input, self.weight, self.bias, group, dim=1)


class FeedForward(stock.AllGatherFusedFeedForward):  # type: ignore[misc]
    """SwiGLU; rows are gathered while they are multiplied, and reduce-scattered with the last product."""

    @dataclass(kw_only=True, slots=True)
    class Config(stock.AllGatherFusedFeedForward.Config):  # type: ignore[misc]
        """torchtitan's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, S/W, h]` to the same."""
        group = _group(self.w1.weight)
        if group is None:
            result: torch.Tensor = super().forward(x)
            return result
        gate = self.w1.weight
        hidden = all_gather_linear(x, self.w3.weight, None, group, dim=1, gate=gate, activation="silu", save="columns")
        return linear_reduce_scatter(hidden, self.w2.weight, self.w2.bias, group, dim=1)


@override(target=stock.AllGatherFusedQKVLinear.Config, exact=True, description="overweave: gather beside q, k, v")  # type: ignore[untyped-decorator]
def qkv(config: Any) -> Any:
    """Attention's input projection."""
    return derive(config, Qkv.Config)


@override(target=stock.RowParallelLinear.Config, exact=True, description="overweave: scatter beside the projection")  # type: ignore[untyped-decorator]
def row_parallel(config: Any) -> Any:
    """Attention's output projection."""
    return derive(config, RowParallel.Config)


@override(target=stock.AllGatherFusedFeedForward.Config, exact=True, description="overweave: SwiGLU")  # type: ignore[untyped-decorator]
def feed_forward(config: Any) -> Any:
    """The feed-forward layer."""
    return derive(config, FeedForward.Config)


def _group(weight: torch.Tensor) -> Any:
    """Return the tensor-parallel group. None where torchtitan's modules answer: one rank, type checking, or a weight
    that overweave does not multiply by."""
    return None if spmd_types.is_type_checking() or obstacle_of(weight) else stock._tp_group_from_context()
