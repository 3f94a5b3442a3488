"""Experts in fp8: rows as they are quantised, and products beside fp64, whose error is at most that of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional

from overweave import moe
from overweave.errors import InputError
from overweave.moe.fp8 import FP8
from overweave.moe.glu import gated
from tests.ranks import run_ranks

T, K, N, EXPERTS, TOP = 24, 48, 32, 5, 3
WORST = 1.05  # errors, in those of torch


def drawn(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    up, down = torch.randn(EXPERTS, 2 * N, K, generator=draw), torch.randn(EXPERTS, K, N, generator=draw)
    return {
        "x": torch.randn(T, K, generator=draw).to(dtype) * torch.logspace(-3, 3, T)[:, None].to(dtype),
        "ids": torch.rand(T, EXPERTS, generator=draw).argsort(1)[:, :TOP].int(),
        "weights": torch.rand(T, TOP, generator=draw),
        "up": moe.quantise_rows(up),
        "down": moe.quantise_rows(down),
        "up_bias": torch.randn(EXPERTS, 2 * N, generator=draw).to(dtype),
        "down_bias": torch.randn(EXPERTS, K, generator=draw).to(dtype),
    }


def exactly(factor: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """What quantised rows stand for."""
    values, scales = factor
    return values.to(dtype) * scales.to(dtype).unsqueeze(-1)


def is_as_good(got: torch.Tensor, by_torch: torch.Tensor, exact: torch.Tensor) -> bool:
    found, usual = ((one.double() - exact).square().mean() for one in (got, by_torch))
    return bool(found <= WORST**2 * usual)


def test_rows_are_quantised_each_by_its_largest():
    x = torch.tensor([[0.0, -896.0, 448.0], [0.0, 0.0, 0.0], [1.0, torch.nan, 2.0]], dtype=torch.bfloat16)
    values, scales = moe.quantise_rows(x)
    assert values.dtype == FP8
    assert values[0].float().tolist() == [0.0, -448.0, 224.0]
    assert scales[0] == 2.0
    assert not values[1].float().any()
    assert values[2].float().isnan().all()
    stack = torch.randn(2, 3, 16)
    values, scales = moe.quantise_rows(stack)
    assert (values.shape, scales.shape) == (stack.shape, (2, 3))
    torch.testing.assert_close(exactly((values, scales), torch.float32), stack, rtol=2**-4, atol=1e-2)


GLUS = {
    "none": None,
    "halves": moe.Glu(),
    "interleaved": moe.Glu(interleaved=True, activation="gelu"),
    "of gpt-oss": moe.GPT_OSS,
}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("glu", GLUS)
def test_the_first_matmul(glu: str, has_bias: bool):
    given, how = drawn(), GLUS[glu]
    (w, scale), bias = given["up"], given["up_bias"] if has_bias else None
    h, routed = moe.experts_matmul(given["x"], given["ids"], w, scale_w=scale, bias=bias, glu=how)
    tables = routed.tables
    experts = given["ids"].flatten()[tables.order.long()].long()

    def plain(dtype: torch.dtype) -> torch.Tensor:
        x = exactly(moe.quantise_rows(given["x"]), dtype)[tables.tokens.long()]
        rows = (exactly((w, scale), dtype)[experts] @ x.unsqueeze(2)).squeeze(2)
        rows = rows if bias is None else rows + bias.to(dtype)[experts]
        return rows if how is None else in_double(rows, how) if dtype == torch.float64 else gated(rows, how)

    assert h.dtype == torch.bfloat16
    assert is_as_good(h, plain(torch.float32).bfloat16(), plain(torch.float64))


def in_double(rows: torch.Tensor, glu: moe.Glu) -> torch.Tensor:
    gate, up = (rows[:, ::2], rows[:, 1::2]) if glu.interleaved else rows.chunk(2, 1)
    if glu.limit is not None:
        gate, up = gate.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit)
    act = functional.gelu(gate) if glu.activation == "gelu" else gate * torch.sigmoid(glu.slope * gate)
    return act * (up + glu.shift)


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_second_matmul(has_bias: bool):
    given = drawn(1)
    (w, scale), bias = given["down"], given["down_bias"] if has_bias else None
    h, routed = moe.experts_matmul(given["x"], given["ids"], given["up"][0], scale_w=given["up"][1], glu=moe.Glu())
    y = moe.experts_sum(h, routed, given["weights"], w, scale_w=scale, bias=bias)
    places, rows = torch.empty(T * TOP, dtype=torch.long), routed.tables.order.long()
    places[rows] = torch.arange(T * TOP)

    def plain(dtype: torch.dtype) -> torch.Tensor:
        pairs = exactly(moe.quantise_rows(h), dtype)[places].view(T, TOP, -1)
        z = (exactly((w, scale), dtype)[given["ids"].long()] @ pairs.unsqueeze(3)).squeeze(3)
        z = z * given["weights"].to(dtype).unsqueeze(2)
        z = z.bfloat16().to(dtype) if dtype == torch.float32 else z
        y = z.sum(1)
        return y if bias is None else y + (bias.to(dtype)[given["ids"].long()] * given["weights"][..., None]).sum(1)

    assert is_as_good(y, plain(torch.float32).bfloat16(), plain(torch.float64))


def layers() -> list[float]:
    """Sequential over ranks, of which each has some whole experts, or its part of every expert: how far off, of the
    size of what one rank makes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    given = drawn(2, torch.float32)
    own = slice(rank * T // ranks, (rank + 1) * T // ranks)
    tokens = given["x"][own], given["ids"][own], given["weights"][own]
    first = rank * (EXPERTS // ranks)
    held = slice(first, EXPERTS if rank == ranks - 1 else first + EXPERTS // ranks)
    columns = torch.arange(N).view(ranks, -1)[rank]
    (up, up_scale), (down, down_scale) = given["up"], given["down"]
    of_up = torch.cat([columns, N + columns])
    ways = {
        "whole": moe.ExpertWeights(
            *(up[held], down[held], None, None, moe.Glu(), first), up_scale=up_scale[held], down_scale=down_scale[held]
        ),
        "parts": moe.ExpertWeights(
            *(up[:, of_up], down[:, :, columns].contiguous(), None, None, moe.Glu()),
            up_scale=up_scale[:, of_up].contiguous(),
            down_scale=down_scale,
        ),
    }
    h, routed = moe.experts_matmul(given["x"], given["ids"], up, scale_w=up_scale, glu=moe.Glu())
    want = moe.experts_sum(h, routed, given["weights"], down, scale_w=down_scale)[own]
    made = [moe.experts_mlp(*tokens, way) for way in ways.values()]
    return [float((each - want).norm() / want.norm()) for each in made]


def test_layers_over_ranks():
    """Parts of a row are quantised each by its own largest: their sum is another, within what fp8 rounds."""
    for whole, parts in run_ranks(layers, 2):
        assert whole < 1e-5
        assert parts < 2**-5


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no scales": ({"scale_w": None}, "got NoneType"),
    "scales of other experts": ({"scale_w": torch.ones(1, 2 * N)}, r"float32 \[1, 64\]"),
    "scales of another dtype": ({"scale_w": torch.ones(EXPERTS, 2 * N).double()}, "float64"),
    "scales of weights that are not fp8": ({"w": torch.ones(EXPERTS, 2 * N, K)}, "beside torch.float32"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused(name: str):
    given, (changed, told) = drawn(), BAD[name]
    w, scale = given["up"]
    with pytest.raises(InputError, match=told):
        moe.experts_matmul(given["x"], given["ids"], **({"w": w, "scale_w": scale} | changed))


def test_no_gradient_is_made_up():
    given = drawn()
    x = given["x"].requires_grad_()
    h, _ = moe.experts_matmul(x, given["ids"], given["up"][0], scale_w=given["up"][1])
    with pytest.raises(NotImplementedError, match="no gradients of fp8"):
        h.sum().backward()
