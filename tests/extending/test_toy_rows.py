"""Epilogues of parts and of whole rows, in a file of their own, are served by a method, or refused before a launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

import overweave as ow
import overweave.functional
from overweave.errors import InputError
from overweave.hardware.machine import load
from overweave.ir.epilogue import Applied, Epilogue, Norm
from overweave.ir.operators.forms import Form, Input, OfRow, register
from overweave.ir.problem import Problem
from overweave.ir.text.files import from_json, to_json
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.ops.dispatch.schema import DEFINED
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import METHODS
from overweave.sim.simulate import total_us
from overweave.tuner.space.shapes import with_epilogue
from tests.extending import toy_rows
from tests.ranks import run_ranks
from tests.registries import kept_registries
from tests.source_tree import ROOT

M, N, K = 13, 24, 16
FP8 = {"fp8_largest": 448.0, "fp8_smallest": 1e-12}
ROWS = Applied("fp8_rows", (448.0, 1e-12))
PARTS = Epilogue(more=(Applied("scaled_parts", (), True),))
PLANS = {
    "matmul_reduce_scatter": (None, "sequential", "scatter pieces=2", "scatter_packed"),
    "matmul_all_reduce": (None, "sequential", "two_shot", "two_shot_packed"),
}
OF_PARTS_ALONE = {
    "matmul_reduce_scatter": ("fused_ring", "decomposed", "ring_stored", "remote_add"),
    "matmul_all_reduce": ("decomposed", "one_shot_packed", "ring_stored"),
}
CLAMP = Form(
    name="clamped",
    numbers={"lowest": -1.0},
    where=("sum",),
    reference=lambda y, beside: y.clamp(min=beside[0]),
    device=lambda value, beside: value,
)
ANYWHERE = replace(toy_rows.ALPHA, name="anywhere", inputs=(Input("gamma"),), where=("product", "part", "sum"))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with kept_registries():
        toy_rows.add()
        yield


def problem(operator: str, m: int = M, **fields: Any) -> Problem:
    return Problem(operator=operator, m=m, n=192, k=128, dtype="bfloat16", **{"world_size": 3} | fields)


def is_served(name: str, asked: Problem, options: dict[str, Any]) -> bool:
    try:
        plan = build(name, asked, options)
    except InputError:
        return False
    verify_plan(plan, MachineLimits()).raise_if_refused()
    assert from_json(to_json(plan)) == plan
    return True


def test_it_is_short():
    assert len((ROOT / "tests/extending/toy_rows.py").read_text().splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_method_serves_a_form_where_it_serves_its_like(world_size: int):
    """Whole rows where it norms; sums where it has an activation; parts of sums, and alike parts of columns."""
    register(CLAMP)
    register(ANYWHERE)
    activation = {"epilogue": Epilogue(activation="silu")}
    like = (
        ({"norm": Norm(eps=1e-5)}, {"rows": ROWS}),
        (activation, {"epilogue": Epilogue(more=(Applied("clamped", (0.0,)),))}),
        ({}, {"epilogue": Epilogue(more=(Applied("anywhere"),))}),
        ({}, {"epilogue": PARTS}),
    )
    differ = []
    for name, method in METHODS.items():
        for options in ({}, {"sums": "epilogue"}) if any(each.name == "sums" for each in method.options) else ({},):
            for known, form in like if "matmul_" in name and method.operator.startswith("matmul_") else like[2:3]:
                if method.operator.count("all_to_all") or "waves" in name or "islands" in name:
                    continue
                served = [
                    is_served(name, problem(method.operator, world_size=world_size, **each), options)
                    for each in (known, form)
                ]
                differ += [(name, options, form)] if served[0] != served[1] else []
    assert not differ


def test_tiles_that_store_block_by_block_do_nothing_to_parts():
    with pytest.raises(InputError, match="block by block"):
        build("matmul_reduce_scatter.waves", problem("matmul_reduce_scatter", epilogue=PARTS), {})


def test_who_has_no_sums_takes_none_of_sums_parts_and_rows():
    for form in ({"epilogue": PARTS}, {"rows": ROWS}):
        with pytest.raises(InputError, match="would apply to products"):
            build("all_gather_matmul.push", problem("all_gather_matmul", **form), {})


def called(operator: str, plan: str | None, is_differentiated: bool = False, **form: Any) -> tuple[Any, Any, list[Any]]:
    """What a call returns, the exact sum of the own rows, and the inputs of both."""
    torch.manual_seed(dist.get_rank())
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x, w = torch.randint(-2, 3, (M, K)).float(), torch.randint(-2, 3, (K, N)).float()
    beta = torch.tensor([0.5, 2.0]).repeat(N // 2)
    inputs = [each.clone().requires_grad_(is_differentiated) for each in (x, w, beta)]
    made = getattr(ow, operator)(*inputs[:2], beta=inputs[2], plan=plan, **form)
    total = (x @ w) * beta
    dist.all_reduce(total)
    shards = torch.chunk(total, ranks)
    own = shards[rank] if rank < len(shards) else total[:0]
    return made, own if operator == "matmul_reduce_scatter" else total, inputs


def wrong_calls() -> list[str]:
    toy_rows.add()
    found = []
    for operator, plans in PLANS.items():
        for plan in plans:
            if dist.get_world_size() == 1 and plan not in (None, "sequential"):
                continue
            (values, scales), total, _ = called(operator, plan, **FP8)
            exact = toy_rows.quantised(total, tuple(FP8.values()))
            same = torch.equal(values.float(), exact[0].float()) and torch.equal(scales, exact[1])
            found += [] if same and values.dtype == torch.float8_e4m3fn else [f"{operator} {plan}"]
        for plan in (*plans, *OF_PARTS_ALONE[operator]):
            y, total, _ = called(operator, plan)
            found += [] if torch.equal(y, total) else [f"{operator} {plan} of parts"]
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_plans_have_the_bits_of_plain_torch(world_size: int):
    assert run_ranks(wrong_calls, world_size) == [[]] * world_size


def wrong_gradients() -> list[str]:
    """Of parts beside a bias, and of rows that are quantised."""
    toy_rows.add()
    found, bias = [], torch.arange(float(N))
    for operator in PLANS:
        y, total, (x, w, beta) = called(operator, None, True, bias=bias)
        found += [] if torch.equal(y, total + bias) else [operator]
        y.sum().backward()
        same = [each.detach().clone().requires_grad_() for each in (x, w)]
        ((same[0] @ same[1]) * beta.detach()).sum().backward()
        alike = [torch.allclose(one.grad, other.grad) for one, other in zip((x, w), same, strict=True)]
        found += [] if all(alike) and beta.grad is not None else [f"{operator}: a gradient"]
        (values, scales), _, (x, w, beta) = called(operator, None, True, **FP8)
        (values.float() * scales).sum().backward()
        found += [] if all(each.grad is not None for each in (x, w, beta)) else [f"{operator}: rows"]
    return found


def test_it_is_differentiated():
    assert run_ranks(wrong_gradients, 2) == [[]] * 2


def compiled() -> list[Any]:
    toy_rows.add()
    x, w, beta = torch.randn(M, K), torch.randn(K, N), torch.randn(N)
    call = torch.compile(
        lambda x, w, beta: ow.matmul_all_reduce(x, w, beta=beta, **FP8), fullgraph=True, backend="aot_eager"
    )
    values, scales = call(x, w, beta)
    exact = toy_rows.quantised((x @ w) * beta, tuple(FP8.values()))
    return [torch.allclose(values.float(), exact[0].float(), rtol=0.07), torch.allclose(scales, exact[1])]


@pytest.mark.slow
def test_a_compiler_reads_it():
    assert run_ranks(compiled, 1) == [[True] * 2]


def words_for_bad_calls() -> list[str]:
    toy_rows.add()
    x, w, said = torch.ones(2, K), torch.ones(K, N), []
    for given in (
        {"fp8_largest": 448.0},
        {**FP8, "bias": torch.ones(N)},
        {**FP8, "norm": ow.RmsNorm(torch.ones(N))},
        {**FP8, "plan": "decomposed"},
        {"beta": torch.ones(N), "norm": ow.RmsNorm(torch.ones(N))},
    ):
        with pytest.raises(InputError) as refused:
            ow.matmul_all_reduce(x, w, **given)
        said.append(str(refused.value))
    return said


def test_bad_calls_are_typed_errors():
    words = ("fp8_smallest=: fp8_rows needs it", "beside fp8_rows", "both of whole rows", "its last step", "a norm")
    for said in run_ranks(words_for_bad_calls, 2):
        assert all(word in each for word, each in zip(words, said, strict=True)), said


def test_the_op_the_tuner_and_the_model_know_it():
    assert "float? fp8_largest=None" in str(DEFINED["matmul_all_reduce"].op._schema)
    bare = problem("matmul_all_reduce", 4096, world_size=4)
    asked = with_epilogue(bare, after="scaled_parts+fp8_rows")
    assert (asked.rows, asked.epilogue) == (ROWS, PARTS)
    plans = [build("matmul_all_reduce.two_shot", each, {}) for each in (replace(bare, norm=Norm(eps=1e-5)), asked)]
    normed_us, quantised_us = [total_us(plan, load("h200x4")) for plan in plans]
    assert quantised_us > normed_us  # it is charged for what it makes


OF_ROW = OfRow(of_element=toy_rows.size, number=toy_rows.scale)


@pytest.mark.parametrize(
    "changes",
    [
        {"where": ("row",)},
        {"where": ("row", "sum"), "of_row": OF_ROW},
        {"where": ("row",), "of_row": OF_ROW},
        {"where": ()},
        {"where": ("part",), "inputs": (Input("delta", "y"),)},
        {"makes": (Input("made", "y"),)},
        {"where": ("row",), "of_row": OF_ROW, "makes": (Input("made", "y", dtype="int8"),)},
        {"where": ("row",), "of_row": OF_ROW, "makes": (Input("y", "y"),)},
    ],
)
def test_a_record_that_nothing_serves_is_refused(changes: dict[str, Any]):
    with pytest.raises(InputError, match="register the epilogue"):
        register(replace(toy_rows.ALPHA, **{"name": "other", "inputs": (), "numbers": {"eta": 1.0}} | changes))
