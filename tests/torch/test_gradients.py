"""Results and gradients of every form, held against fp64 autograd, beside plain torch in the same dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

import overweave as ow
from campaigns.torch.layers import Layer, errors, is_too_large
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow
SAVES = ("gathered", "shard", "columns")


def gathers(shape: tuple[int, ...], dim: int = 0, save: str = "gathered", **options) -> Layer:
    extras, widths = options.pop("extras", ()), options.pop("widths", (96,))
    return Layer("all_gather_linear", shape, dim, widths, 1, extras, (("save", save), *options.items()))


EVERY_SHAPE = (
    ((12,), 0),
    ((7,), 0),
    ((2, 6), 1),
    ((2, 7), 1),
    ((6, 2), 0),
    ((7, 2), 0),
    ((2, 3, 4), 1),
    ((2, 4, 5), 2),
)
SHORT = (
    gathers((12,), extras=("bias",)),
    gathers((2, 6), 1, "columns", widths=(96, 24), activation="silu"),
    gathers((6, 2), 0, "shard", extras=("gate", "residual"), activation="silu"),
    Layer("linear_reduce_scatter", (2, 6), 1, products=2, extras=("bias", "residual")),
    Layer("linear_all_reduce", (2, 3), extras=("norm", "residual")),
)
LONG = (
    *(gathers(shape, dim, save, extras=("bias",)) for shape, dim in EVERY_SHAPE for save in SAVES),
    *(gathers((9,), 0, save, widths=(96, 24, 32), extras=("bias",), return_gathered=True) for save in SAVES),
    *(gathers((2, 8), 1, save, extras=("gate",), activation="gelu") for save in SAVES),
    *(gathers(shape, dim, extras=("residual",), activation="silu") for shape, dim in EVERY_SHAPE),
    *(Layer("linear_reduce_scatter", shape, dim, extras=("bias", "residual")) for shape, dim in EVERY_SHAPE),
    *(Layer("linear_reduce_scatter", shape, dim, products=3) for shape, dim in EVERY_SHAPE),
    Layer("linear_reduce_scatter", (8,), extras=("bias", "residual"), options=(("activation", "gelu"),)),
    *(Layer("linear_all_reduce", shape, extras=("bias", "residual")) for shape in ((5,), (2, 3), (2, 3, 2))),
    Layer("linear_all_reduce", (2, 3), extras=("bias",), options=(("activation", "silu"),)),
    Layer("linear_all_reduce", (7,), extras=("norm",)),
    *(layer._replace(strided=True) for layer in SHORT),
)


def too_large(layers: tuple[Layer, ...], dtype: torch.dtype) -> list[str]:
    """What is further from fp64 than plain torch is."""
    told = []
    for layer in layers:
        told += [f"{layer} {name}: {pair}" for name, pair in errors(layer, dtype).items() if is_too_large(pair)]
    return told


def exchanges_off() -> list[str]:
    """Which results and gradients of both exchanges are not those of torch's differentiable one: integers, exact."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    uneven = [[(source + 2 * target) % 4 for target in range(ranks)] for source in range(ranks)]
    told = []
    for operator in (ow.all_to_all_matmul, ow.matmul_all_to_all):
        for counts in (None, uneven):
            matrix = counts or [[2] * ranks] * ranks
            sent, received = matrix[rank], [row[rank] for row in matrix]
            order = list(range(sum(sent)))[::-1] if operator is ow.matmul_all_to_all else None
            x, w = (torch.randint(-3, 4, shape).float().requires_grad_() for shape in ((sum(sent), 8), (8, 6)))
            given: dict[str, Any] = {"counts": counts} | ({"tokens": order} if order is not None else {})
            y = operator(x, w, **given)
            if order is None:
                wanted = all_to_all_single_autograd(x, received, sent, dist.group.WORLD) @ w
            else:
                wanted = all_to_all_single_autograd(x[order] @ w, received, sent, dist.group.WORLD)
            dy = torch.randint(-3, 4, wanted.shape).float()
            pairs = zip(*(torch.autograd.grad(each, (x, w), dy) for each in (y, wanted)), strict=True)
            same = [torch.equal(y, wanted), *(torch.equal(*pair) for pair in pairs)]
            told += [] if all(same) else [f"{operator.__name__} {counts}: {same}"]
    return told


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_of_exchanges(world_size: int):
    assert run_ranks(exchanges_off, world_size) == [[]] * world_size


def test_gradients_of_a_few_forms():
    assert run_ranks(too_large, 2, SHORT, torch.bfloat16) == [[], []]


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_of_every_form(world_size: int, dtype: torch.dtype):
    assert run_ranks(too_large, world_size, LONG, dtype, timeout_s=240) == [[]] * world_size
