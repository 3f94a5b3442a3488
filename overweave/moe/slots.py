"""Sums over slots as an op of torch: a token's products, weighed, in the order of its experts."""

from __future__ import annotations

from typing import Any

import torch

from overweave.ops.dispatch.torch_ops import TorchOp, define
from overweave.runtime.backends import load
from overweave.runtime.library import slots as library
from overweave.runtime.library.slots import SlotSums


def ordered_sum(
    z: torch.Tensor, places: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, top: int
) -> torch.Tensor:
    """Products `[t * top, n]` -> `[t, n]`: weighed in fp32, added in fp32, slot by slot, and rounded once.

    places: int32 `[t * top]`, the row of each pair; from `offsets[-1]` on rows are of no expert, and add nothing, and z
    may end there if no weights are given. weights: `[t, top]`, or None. Gradients: of z and weights.
    """
    total: torch.Tensor = torch.ops.overweave.ordered_sum(z, places, offsets, weights, top)
    return total


def add_slots(sums: SlotSums, out: torch.Tensor) -> None:
    """Compute `out` on the device of the tensors."""
    if out.is_cuda:
        load("gpu slots")(sums, out)
    else:
        out.copy_(library.add(sums))


def _sum(
    z: torch.Tensor, places: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, top: int
) -> torch.Tensor:
    own = None if weights is None else weights.float()
    if own is not None and own.stride(1) != 1:
        own = own.contiguous()
    out = z.new_empty((places.shape[0] // top, z.shape[1]))
    add_slots(SlotSums(z.contiguous(), places.view(len(out), top), offsets[-1:], own), out)
    return out


def _fake(
    z: torch.Tensor, places: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, top: int
) -> torch.Tensor:
    return z.new_empty((places.shape[0] // top, z.shape[1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    z, places, offsets, weights, ctx.top = inputs
    ctx.rows = z.shape[0]
    ctx.save_for_backward(places, offsets, *([] if weights is None else [z, weights]))


def _gradient(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    """Return the gradients of products (their token's times their weight) and of weights (product times token's)."""
    places, offsets, *weighed = ctx.saved_tensors
    order = torch.empty_like(places).index_put((places.long(),), torch.arange(len(places), device=places.device).int())
    order = order[: ctx.rows]
    dz = dy.index_select(0, order // ctx.top)
    if not weighed:
        return dz, None, None, None, None
    z, weights = weighed
    is_there = (places < offsets[-1]).view(weights.shape)
    dz = (dz.float() * torch.where(is_there, weights.float(), 0.0).flatten().index_select(0, order).unsqueeze(1)).to(z)
    products = z.index_select(0, places).view(*weights.shape, dy.shape[1]).float()
    dweights = torch.where(is_there, (products * dy.float().unsqueeze(1)).sum(2), 0.0)
    return dz, None, None, dweights.to(weights.dtype), None


_SUM = "(Tensor z, Tensor places, Tensor offsets, Tensor? weights, int top) -> Tensor"
define(TorchOp("ordered_sum", _SUM, _sum, _fake, _gradient, _keep))
