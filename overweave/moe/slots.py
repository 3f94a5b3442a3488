"""Sums over slots as an op of torch: the products of a token's experts, or the parts that ranks have of it."""

from __future__ import annotations

from typing import Any

import torch

from overweave.ops.dispatch.torch_ops import TorchOp, define
from overweave.runtime.backends import load


def ordered_sum(parts: torch.Tensor, is_there: torch.Tensor | None = None) -> torch.Tensor:
    """`[rows, slots, n]` -> `[rows, n]`: in fp32, slot by slot, rounded once. is_there: bool `[rows, slots]`; what is
    not there is not added, nor read on a GPU; None: all are."""
    total: torch.Tensor = torch.ops.overweave.ordered_sum(parts, is_there)
    return total


def _sum(parts: torch.Tensor, is_there: torch.Tensor | None) -> torch.Tensor:
    if parts.is_cuda and parts.stride(2) == 1:
        out = parts.new_empty((parts.shape[0], parts.shape[2]))
        load("gpu slots")(parts, None if is_there is None else is_there.contiguous(), out)
        return out
    total = parts.new_zeros((parts.shape[0], parts.shape[2]), dtype=torch.float32)
    for slot in range(parts.shape[1]):
        part = parts[:, slot].float()
        total += part if is_there is None else torch.where(is_there[:, slot, None], part, 0.0)
    return total.to(parts.dtype)


def _fake(parts: torch.Tensor, is_there: torch.Tensor | None) -> torch.Tensor:
    return parts.new_empty((parts.shape[0], parts.shape[2]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    parts, is_there = inputs
    ctx.slots, ctx.is_masked = parts.shape[1], is_there is not None
    ctx.save_for_backward(*([is_there] if is_there is not None else []))


def _gradient(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    of_slots = gradient.unsqueeze(1).expand(-1, ctx.slots, -1)
    if not ctx.is_masked:
        return of_slots, None
    (is_there,) = ctx.saved_tensors
    return torch.where(is_there.unsqueeze(2), of_slots, 0.0), None


define(TorchOp("ordered_sum", "(Tensor parts, Tensor? is_there) -> Tensor", _sum, _fake, _gradient, _keep))
