"""`all_gather_matmul` by several weights over one gather, on CPU ranks: every bit, every plan, and what is refused."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overweave as ow
from overweave.errors import OverweaveError
from overweave.ir.shards import shard_rows
from tests.ops.calls import rows
from tests.ranks import run_ranks

K = 16
PLANS = (None, "sequential", "per_shard", "push pieces=2", "pull")
QKV, PAIR = (24, 8, 8), (24, 24)
ANY = (QKV, PAIR, (13, 7), (8,) * 5)  # what library plans take
LIBRARY = (None, "sequential", "per_shard")


def integers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=generator).float()


def wrong_products(plans: tuple[str | None, ...], seed: int) -> list[str]:
    """For `run_ranks`: what is not equal to plain torch on this rank, each call made twice with other tensors."""
    rank, ranks, wrong, chance = dist.get_rank(), dist.get_world_size(), [], random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for m in rows(ranks):
        for plan in plans:
            columns = chance.choice(ANY if plan in LIBRARY else (QKV, PAIR))
            is_transposed, returns = chance.random() < 0.5, chance.random() < 0.5
            for turn in range(2):
                x = integers(generator, m, K)
                weights = [integers(generator, K, cols) for cols in columns]
                given = [w.t().contiguous().t() for w in weights] if is_transposed else weights
                shards = x.chunk(ranks)
                shard = shards[rank] if rank < len(shards) else x[:0]
                if returns:
                    ys, gathered = ow.all_gather_matmul(shard, tuple(given), m=m, plan=plan, return_gathered=True)
                    assert torch.equal(gathered, x)
                else:
                    ys = ow.all_gather_matmul(shard, given, m=m, plan=plan)
                if not (
                    len(ys) == len(weights) and all(torch.equal(y, x @ w) for y, w in zip(ys, weights, strict=True))
                ):
                    wrong.append(f"{plan} m={m} {columns} turn {turn}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_number_of_rows(world_size: int):
    assert run_ranks(wrong_products, world_size, (None, "push"), world_size) == [[]] * world_size


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_plan(world_size: int):
    for seed in range(3):
        assert run_ranks(wrong_products, world_size, PLANS, seed, timeout_s=120) == [[]] * world_size


def forms_and_errors() -> list[str]:
    x, w = torch.ones(2, K), torch.ones(K, 8)
    m = 2 * dist.get_world_size()
    (alone,) = ow.all_gather_matmul(x, [w])
    both = ow.all_gather_matmul(x, (w, w))  # one tensor twice is two weights
    assert alone.shape == (m, 8)
    assert torch.equal(both[0], both[1])
    assert both[0].data_ptr() != both[1].data_ptr()
    found = []
    for weights, options in (
        ([], {}),
        ([w, "w"], {}),
        ([w, w.half()], {}),
        ([w, torch.ones(K + 1, 8)], {}),
        ([w, torch.ones(8, K).t()], {}),
        ([w, w[:, ::2]], {}),
        ([w] * 65, {}),
        ([w] * 4, {"plan": "push"}),
        ([w, w], {"residual": torch.ones(m, 16)}),
        ([w, w], {"gate": w}),
        ([w, w], {"bias": torch.ones(8)}),
        ((each for each in (w, w)), {}),
    ):
        try:
            ow.all_gather_matmul(x, weights, **options)  # type: ignore[call-overload]
            found.append("nothing raised")
        except OverweaveError as error:
            found.append(f"{type(error).__name__} {error}")
    return found


def test_bad_weights_are_typed_errors_on_every_rank():
    words = (
        "got 0 weights",
        "w[1]: got str",
        "w[1] is torch.float16",
        "w[1] is [17, 8]",
        "they lie as [k, n], [n, k]",
        "w[1] [16, 4] has strides (8, 2)",
        "got 65 weights",
        "4 weights",
        "2 weights: all_gather_matmul with residual takes one",
        "2 weights: all_gather_matmul with gate takes one",
        "bias: got [8] of",
        "got generator",
    )
    for of_rank in run_ranks(forms_and_errors, 2):
        assert all(found.startswith("InputError") for found in of_rank), of_rank
        assert all(word in found for word, found in zip(words, of_rank, strict=True)), of_rank


def ask_for_different_splits() -> str:
    columns = (8, 16) if dist.get_rank() else (16, 8)
    try:
        ow.all_gather_matmul(torch.ones(2, K), [torch.ones(K, cols) for cols in columns])
    except OverweaveError as error:
        return f"{type(error).__name__} {error}"
    return "nothing raised"


def test_ranks_agree_on_the_weights():
    for found in run_ranks(ask_for_different_splits, 2):
        assert found.startswith("RankMismatch")
        assert "n=8+16" in found
        assert "n=16+8" in found


def test_explain_knows_several_weights():
    sizes = {"m": 8192, "k": 4096, "world_size": 4, "device": "cpu"}
    assert ow.explain("all_gather_matmul", n=(1024, 256, 256), **sizes).plan == "all_gather_matmul.push"
    many = ow.explain("all_gather_matmul", n=(256,) * 4, **sizes)
    assert many.plan == "all_gather_matmul.per_shard"
    assert "there are 4 weights, and a tile kernel takes 3" in str(many)


def wrong_finished_products() -> list[str]:
    """A bias for the columns of all weights, and scales of fp8 operands, by one element or by rows and columns."""
    rank, ranks, wrong = dist.get_rank(), dist.get_world_size(), []
    generator, fp8 = torch.Generator().manual_seed(7), torch.float8_e4m3fn
    for m, plan, form in product((1, 37), PLANS, ("bias", "rows", "tensor")):
        columns, k = (32, 16, 16), 32
        x, n = integers(generator, m, k), sum(columns)
        weights = [integers(generator, cols, k) for cols in columns]
        bias, is_fp8 = integers(generator, n), form != "bias"
        by_row, by_column = (2.0 ** torch.randint(-2, 3, shape, generator=generator) for shape in ((m, 1), (1, n)))
        scales = {"rows": (by_row, by_column), "tensor": (torch.tensor([0.5]), torch.tensor([4.0]))}.get(form)
        own = slice(*shard_rows(m, ranks, rank))
        product_of_all = torch.cat([x @ w.t() for w in weights], dim=1)
        exact = product_of_all * scales[0] * scales[1] if scales else product_of_all
        exact = exact + bias
        beside: dict[str, Any] = {"bias": bias}
        if scales is not None:
            own_scales = scales[0][own] if form == "rows" else scales[0]
            beside = {"bias": bias.half(), "scale_x": own_scales, "scale_w": scales[1], "out_dtype": torch.float16}
        dtype = fp8 if is_fp8 else torch.float32
        given = [w.to(dtype).t() for w in weights]
        ys = ow.all_gather_matmul(x[own].to(dtype), given, m=m, **beside, plan=plan)
        parts = exact.split(columns, dim=1)
        if len(ys) != 3 or not all(torch.equal(y.float(), part) for y, part in zip(ys, parts, strict=True)):
            wrong.append(f"{plan} m={m} {form}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_products_of_several_weights_are_finished(world_size: int):
    assert run_ranks(wrong_finished_products, world_size) == [[]] * world_size


def tuned_choice() -> list[object]:
    """A tuning of fp8 by three weights with a bias; and what such a call then takes."""
    columns, after = (32, 16, 16), "bias+silu"
    taken = ow.tune("all_gather_matmul", m=32, n=columns, k=32, dtype=torch.float8_e4m3fn, after=after, device="cpu")
    told = ow.explain(
        "all_gather_matmul", m=32, n=columns, k=32, world_size=2, dtype=torch.float8_e4m3fn, after=after, device="cpu"
    )
    return [taken.source, told.text == taken.text]


@pytest.mark.slow
def test_several_weights_are_tuned_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OVERWEAVE_CACHE_DIR", str(tmp_path))
    assert run_ranks(tuned_choice, 2) == [["cache", True]] * 2
