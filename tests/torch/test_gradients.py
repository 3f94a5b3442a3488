"""Results and gradients of every form, held against fp64 autograd, beside plain torch in the same dtype."""

from __future__ import annotations

import pytest
import torch

from campaigns.torch.layers import Layer, errors, exchanges_off, is_too_large
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
    Layer(
        "linear_reduce_scatter", (2, 6), 1, products=2, extras=("bias", "residual"), options=(("activation", "gelu"),)
    ),
    Layer("linear_reduce_scatter", (2, 5), 1, extras=("norm", "residual")),
    Layer("linear_all_reduce", (2, 3), products=2, extras=("norm", "residual")),
)
LONG = (
    *(gathers(shape, dim, save, extras=("bias",)) for shape, dim in EVERY_SHAPE for save in SAVES),
    *(gathers((9,), 0, save, widths=(96, 24, 32), extras=("bias",), return_gathered=True) for save in SAVES),
    *(gathers((2, 8), 1, save, extras=("gate",), activation="gelu") for save in SAVES),
    *(gathers(shape, dim, extras=("residual",), activation="silu") for shape, dim in EVERY_SHAPE),
    *(Layer("linear_reduce_scatter", shape, dim, extras=("bias", "residual")) for shape, dim in EVERY_SHAPE),
    *(Layer("linear_reduce_scatter", shape, dim, extras=("norm", "residual")) for shape, dim in EVERY_SHAPE),
    *(Layer("linear_reduce_scatter", shape, dim, products=3) for shape, dim in EVERY_SHAPE),
    Layer("linear_reduce_scatter", (8,), extras=("bias", "residual"), options=(("activation", "gelu"),)),
    *(Layer("linear_all_reduce", shape, extras=("bias", "residual")) for shape in ((5,), (2, 3), (2, 3, 2))),
    Layer("linear_all_reduce", (2, 3), extras=("bias",), options=(("activation", "silu"),)),
    Layer("linear_all_reduce", (7,), products=3, extras=("norm",)),
    *(layer._replace(strided=True) for layer in SHORT),
)


def too_large(layers: tuple[Layer, ...], dtype: torch.dtype) -> list[str]:
    """What is further from fp64 than plain torch is."""
    told = []
    for layer in layers:
        told += [f"{layer} {name}: {pair}" for name, pair in errors(layer, dtype).items() if is_too_large(pair)]
    return told


def exchanges() -> list[str]:
    return [told for told in exchanges_off(torch.float32, 8, 6, most=3) if told]


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_of_exchanges(world_size: int):
    assert run_ranks(exchanges, world_size) == [[]] * world_size


def test_gradients_of_a_few_forms():
    assert run_ranks(too_large, 2, SHORT, torch.bfloat16) == [[], []]


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_of_every_form(world_size: int, dtype: torch.dtype):
    assert run_ranks(too_large, world_size, LONG, dtype, timeout_s=240) == [[]] * world_size
