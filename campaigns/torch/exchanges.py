"""Both exchanges, forward and backward, held against the same in plain torch, which computes every rank's part here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import overweave as ow
from overweave.ops.call.devices import own_device

Counts = list[list[int]]
Gradients = tuple[torch.Tensor, ...]


def exchanges_off(dtype: torch.dtype, k: int, n: int, most: int) -> Iterator[str]:
    """Which results and gradients are not plain torch's, bit for bit: whole numbers, whose every sum is exact."""
    ranks = dist.get_world_size()
    uneven = [[(source + 2 * target) % (most + 1) for target in range(ranks)] for source in range(ranks)]
    for is_before in (True, False):
        for counts in (None, uneven):
            found, wanted = (
                _ours(is_before, counts, dtype, (k, n, most)),
                _plain(is_before, counts, dtype, (k, n, most)),
            )
            same = [torch.equal(one, other) for one, other in zip(found, wanted, strict=True)]
            yield "" if all(same) else f"exchange {'before' if is_before else 'behind'}, counts {counts}: {same}"


def _drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    whole = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed))
    return whole.to(own_device(), dtype)


def _operands(rank: int, matrix: Counts, dtype: torch.dtype, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """x, w and the gradient of y of a rank."""
    (k, n, _), received = sizes, sum(row[rank] for row in matrix)
    shapes = ((sum(matrix[rank]), k), (k, n), (received, n))
    x, w, dy = (_drawn(shape, 3 * rank + at, dtype) for at, shape in enumerate(shapes))
    return [x.requires_grad_(), w.requires_grad_(), dy]


def _matrix(counts: Counts | None, most: int) -> Counts:
    ranks = dist.get_world_size()
    return counts or [[most] * ranks] * ranks


def _ours(is_before: bool, counts: Counts | None, dtype: torch.dtype, sizes: tuple[int, ...]) -> Gradients:
    """y, and the gradients of x and w. Rows of an exchange behind the matmul are sent in another order."""
    x, w, dy = _operands(dist.get_rank(), _matrix(counts, sizes[2]), dtype, sizes)
    if is_before:
        y = ow.all_to_all_matmul(x, w, counts=counts)
    else:
        y = ow.matmul_all_to_all(x, w, counts=counts, tokens=_order(x))
    return (y.detach(), *torch.autograd.grad(y, (x, w), dy))


def _order(x: torch.Tensor) -> list[int]:
    return list(range(x.shape[0]))[::-1]


def _plain(is_before: bool, counts: Counts | None, dtype: torch.dtype, sizes: tuple[int, ...]) -> Gradients:
    own, matrix = dist.get_rank(), _matrix(counts, sizes[2])
    every: list[Any] = [_operands(rank, matrix, dtype, sizes) for rank in range(dist.get_world_size())]
    sent = [
        x.split(matrix[rank]) if is_before else (x[_order(x)] @ w).split(matrix[rank])
        for rank, (x, w, _) in enumerate(every)
    ]
    ys = [torch.cat([blocks[rank] for blocks in sent]) for rank in range(len(every))]
    ys = [y @ w for y, (_, w, _) in zip(ys, every, strict=True)] if is_before else ys
    x, w, _ = every[own]
    return (ys[own].detach(), *torch.autograd.grad(ys, (x, w), [dy for _, _, dy in every]))
