"""Results and gradients of every form, held against fp64 autograd, beside plain torch in the same dtype."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.torch.layers import FP64, Layer, ours, plain, with_gradients

pytestmark = pytest.mark.slow
SAVES = ("gathered", "shard", "columns")
MOST = 1.05
EXACT = 1e-6  # of fp32, where torch's own error is this small, or none


def gathers(shape: tuple[int, ...], dim: int = 0, save: str = "gathered", **options) -> Layer:
    extras, widths = options.pop("extras", ()), options.pop("widths", (24,))
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
    gathers((2, 6), 1, "columns", widths=(24, 8), activation="silu"),
    gathers((6, 2), 0, "shard", extras=("gate", "residual"), activation="silu"),
    Layer("linear_reduce_scatter", (2, 6), 1, products=2, extras=("bias", "residual")),
    Layer("linear_all_reduce", (2, 3), extras=("norm", "residual")),
)
LONG = (
    *(gathers(shape, dim, save, extras=("bias",)) for shape, dim in EVERY_SHAPE for save in SAVES),
    *(gathers((9,), 0, save, widths=(24, 8, 16), extras=("bias",), return_gathered=True) for save in SAVES),
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


def errors(layers: tuple[Layer, ...], dtype: torch.dtype) -> dict[str, list[float]]:
    """Of each layer and tensor, the error of ours and that of plain torch, both in the norm over all ranks."""
    told = {}
    for layer in layers:
        exact = with_gradients(layer, plain, FP64)
        found, beside = (with_gradients(layer, compute, dtype) for compute in (ours, plain))
        for name, wanted in exact.items():
            assert found[name].shape == wanted.shape, (layer, name)
            assert found[name].is_contiguous() or not name.startswith("y"), (layer, name)
            squares = [(each[name].double() - wanted).square().sum() for each in (found, beside)]
            sums = torch.stack([*squares, wanted.square().sum()])
            dist.all_reduce(sums)
            told[f"{layer} {name}"] = (sums[:2] / sums[2].clamp_min(1e-30)).sqrt().tolist()
    return told


def too_large(told: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: pair for name, pair in told.items() if pair[0] > max(MOST * pair[1], EXACT)}


def test_gradients_of_a_few_forms():
    for told in run_ranks(errors, 2, SHORT, torch.bfloat16):
        assert len(told) > 20
        assert not too_large(told)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_of_every_form(world_size: int, dtype: torch.dtype):
    for told in run_ranks(partial(errors, LONG, dtype), world_size, timeout_s=240):
        assert not too_large(told)
