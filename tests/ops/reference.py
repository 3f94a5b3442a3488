"""The operators in plain torch.distributed, with all that may follow: what tests compare with."""

from __future__ import annotations

import torch
import torch.distributed as dist

from overweave.ir.epilogue import Activation
from overweave.ir.shards import shard_rows
from overweave.ops.reference import gathered_rows
from overweave.runtime.library.epilogue import ACTIVATIONS


def all_gather_matmul(
    x_shard: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    m: int | None = None,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """x = cat(shards): `activation(x @ w + bias) + residual`, or `(x @ w) * activation(x @ gate) + residual`.

    Shapes as in ops/all_gather_matmul.py.
    """
    x = gathered_rows(x_shard, group, m)
    y = x @ w
    y = y if bias is None else y + bias
    activate = ACTIVATIONS[activation] if activation else lambda value: value
    y = activate(y) if gate is None else y * activate(x @ gate)
    return y if residual is None else y + residual


def all_gather_scaled_matmul(
    x_shard: torch.Tensor,
    w: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    m: int | None = None,
) -> torch.Tensor:
    """`(cat(shards) @ w) * cat(scales of the shards) * scale_w`, or of one scale each, in the dtype of the scales."""
    x = gathered_rows(x_shard.to(scale_x.dtype), group, m)
    by_row = scale_x if scale_x.numel() == scale_w.numel() == 1 else gathered_rows(scale_x, group, m)
    return (x @ w.to(scale_x.dtype)) * by_row * scale_w


def all_gather_scaled_gated_matmul(
    x_shard: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    m: int | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """`y * activation(y of the gate)`, both as `all_gather_scaled_matmul` has them.

    weights: w and the gate, whose scales stand behind those of w.
    """
    first, second = scale_w.reshape(1, -1).chunk(2, dim=1)
    y = all_gather_scaled_matmul(x_shard, weights[0], scale_x, first, group, m=m)
    gate = all_gather_scaled_matmul(x_shard, weights[1], scale_x, second, group, m=m)
    return y * (ACTIVATIONS[activation](gate) if activation else gate)


def matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`activation(sum over ranks of x @ w + bias) + residual`, this rank's rows: multiply, reduce, finish.

    Shapes as in ops/matmul_reduce_scatter.py.
    """
    lo, hi = shard_rows(x.shape[0], dist.get_world_size(group), dist.get_rank(group))
    return _finished(matmul_all_reduce(x, w, group)[lo:hi], bias, activation, residual)


def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`activation(sum over ranks of x @ w + bias) + residual`, all of it. Shapes as in ops/matmul_all_reduce.py."""
    partial = x @ w
    dist.all_reduce(partial, group=group)
    return _finished(partial, bias, activation, residual)


def _finished(
    y: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None, residual: torch.Tensor | None
) -> torch.Tensor:
    y = y if bias is None else y + bias
    y = ACTIVATIONS[activation](y) if activation else y
    return y if residual is None else y + residual


def scaled_matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """`sum over ranks of (x @ w) * scale_x * scale_w`, of each rank's own scales, in their dtype.

    A reduce-scatter keeps its rows of it.
    """
    partial = (x.to(scale_x.dtype) @ w.to(scale_x.dtype)) * scale_x * scale_w
    dist.all_reduce(partial, group=group)
    return partial


def matmul_all_reduce_norm(
    x: torch.Tensor,
    w: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm(z)` and `z = sum over ranks of x @ w + residual`. Shapes as in ops/matmul_all_reduce.py."""
    return _normed(matmul_all_reduce(x, w, group), weight, residual, eps)


def matmul_reduce_scatter_norm(
    x: torch.Tensor,
    w: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of the own rows. Shapes as in ops/matmul_reduce_scatter.py."""
    return _normed(matmul_reduce_scatter(x, w, group), weight, residual, eps)


def _normed(
    z: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    z = z if residual is None else z + residual
    return torch.nn.functional.rms_norm(z, (z.shape[1],), weight, eps), z
