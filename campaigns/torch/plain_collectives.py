"""Collectives of torch along any dimension, of uneven parts, with gradients: what a layer in plain torch is made of."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def own_part(whole: torch.Tensor, dim: int) -> torch.Tensor:
    """A rank's part along a dimension, as torch.chunk deals it."""
    rank, parts = dist.get_rank(), whole.chunk(dist.get_world_size(), dim)
    return (parts[rank] if rank < len(parts) else whole.narrow(dim, 0, 0)).contiguous()


def gathered(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """The parts of all ranks, `size` along the dimension. The gradient of a part is the sum of all ranks'."""
    return _applied(_Gathered, x, dim, size)


def gathered_alike(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """As `gathered`, for results whose gradient is the same on every rank."""
    return _applied(_GatheredAlike, x, dim, size)


def scattered(part: torch.Tensor, dim: int) -> torch.Tensor:
    """A rank's part of the sum. The gradient is that of all parts."""
    return _applied(_Scattered, part, dim)


def reduced(part: torch.Tensor) -> torch.Tensor:
    """The sum, on every rank, whose gradient is the same on every rank."""
    return _applied(_Reduced, part)


def replicated(bias: torch.Tensor, is_scattered: bool) -> torch.Tensor:
    """A tensor that every rank has. Where its results are scattered, its gradient is the sum of all ranks'."""
    return _applied(_Replicated, bias, is_scattered)


def _applied(function: Any, *given: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*given)
    return result


def _all(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    world_size = dist.get_world_size()
    padded = x.new_zeros((*x.shape[:dim], -(-size // world_size), *x.shape[dim + 1 :]))
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(parts, padded)
    return torch.cat(parts, dim).narrow(dim, 0, size)


def _sum(part: torch.Tensor) -> torch.Tensor:
    whole = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole)
    return whole


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        ctx.dim = dim
        return _all(x, dim, size)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return own_part(_sum(dys[0]), ctx.dim), None, None


class _GatheredAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        ctx.dim = dim
        return _all(x, dim, size)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return own_part(dys[0], ctx.dim), None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim, ctx.size = dim, part.shape[dim]
        return own_part(_sum(part), dim)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return _all(dys[0], ctx.dim, ctx.size), None


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        return _sum(part)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return dys[0]


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, is_scattered: bool) -> torch.Tensor:
        ctx.is_scattered = is_scattered
        return bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return _sum(dys[0]) if ctx.is_scattered else dys[0], None
