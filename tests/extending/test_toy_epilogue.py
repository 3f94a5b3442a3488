"""An epilogue in a file of its own is what the package's own ones are, once it is registered."""

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
from overweave.ir.epilogue import Applied, Epilogue
from overweave.ir.operators.forms import Form, Input, register
from overweave.ir.problem import Problem
from overweave.ir.text.files import from_json, to_json
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.ops.dispatch.schema import DEFINED
from overweave.schedules.catalog.catalog import build
from overweave.sim.simulate import total_us
from overweave.tuner.space.shapes import with_epilogue
from tests import forked
from tests.extending import toy_epilogue
from tests.extending.toy_epilogue import FORM, in_torch
from tests.ranks import run_ranks
from tests.registries import kept_registries
from tests.source_tree import ROOT

M, N, K, LOW, HIGH = 13, 24, 16, -3.0, 5.0
LIMITS = {"low": LOW, "high": HIGH}
PLANS = {
    "all_gather_matmul": (None, "sequential", "push pieces=2", "pull"),
    "matmul_reduce_scatter": (None, "sequential", "scatter pieces=2", "fused_ring", "scatter_packed", "decomposed"),
    "matmul_all_reduce": (None, "sequential", "two_shot", "one_shot_packed", "ring_stored"),
}
ON_GPUS = "tests.extending.epilogue_on_gpus"
MORE = Epilogue(more=(Applied("scaled_clamp", (LOW, HIGH)),))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with kept_registries():
        toy_epilogue.add()
        yield


def problem(operator: str, m: int = M, **fields: Any) -> Problem:
    return Problem(operator=operator, m=m, n=N, k=K, dtype="float32", **{"world_size": 3, "epilogue": MORE} | fields)


def test_it_is_short():
    assert len((ROOT / "tests/extending/toy_epilogue.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("operator", PLANS)
def test_plans_with_it_are_proven_and_read_again(operator: str, world_size: int):
    for plan in filter(None, PLANS[operator]):
        name, *options = plan.split()
        asked = dict(option.split("=") for option in options)
        for m in (0, 3, M):
            given = {key: int(value) for key, value in asked.items()}
            found = build(f"{operator}.{name}", problem(operator, m, world_size=world_size), given)
            verify_plan(found, MachineLimits()).raise_if_refused()
            assert from_json(to_json(found)) == found


def called(operator: str, plan: str | None, **changes: Any) -> tuple[Any, Any, list[Any]]:
    """What a call returns, what plain torch has, and the inputs of both."""
    torch.manual_seed(5)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x, w, alpha = torch.randn(M, K), torch.randn(K, N), torch.randn(N)
    inputs = [each.clone().requires_grad_(changes.get("is_differentiated", False)) for each in (x, w, alpha)]
    exact = [each.detach().clone().requires_grad_() for each in inputs]
    shards = torch.chunk(inputs[0], ranks)
    own = (shards[rank] if rank < len(shards) else inputs[0][:0]) if "gather" in operator else inputs[0]
    given = {"m": M} if "gather" in operator else {}
    y = getattr(ow, operator)(own, inputs[1], alpha=inputs[2], **LIMITS, **given, plan=plan)
    whole = exact[0] @ exact[1] * (1 if "gather" in operator else ranks)
    wanted = in_torch(whole, (exact[2], LOW, HIGH))
    if operator == "matmul_reduce_scatter":
        rows = torch.chunk(wanted, ranks)
        wanted = rows[rank] if rank < len(rows) else wanted[:0]
    return y, wanted, [inputs, exact]


def wrong_calls() -> list[str]:
    toy_epilogue.add()
    found = []
    for operator, plans in PLANS.items():
        for plan in plans:
            y, wanted, _ = called(operator, plan)
            found += [] if torch.allclose(y, wanted, atol=1e-4) else [f"{operator} {plan}"]
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_operator_takes_it(world_size: int):
    assert run_ranks(wrong_calls, world_size) == [[]] * world_size


def wrong_gradients() -> list[str]:
    toy_epilogue.add()
    found = []
    for operator in PLANS:
        y, wanted, (inputs, exact) = called(operator, None, is_differentiated=True)
        y.square().sum().backward()
        wanted.square().sum().backward()
        mine, same = inputs[2].grad, exact[2].grad
        found += [] if torch.allclose(y, wanted, atol=1e-4) and torch.allclose(mine, same, rtol=1e-3) else [operator]
        found += [] if inputs[0].grad is not None and inputs[1].grad is not None else [f"{operator}: none of a factor"]
    return found


def test_it_is_differentiated():
    assert run_ranks(wrong_gradients, 2) == [[]] * 2


def test_the_op_of_torch_has_it():
    op = DEFINED["matmul_all_reduce"].op
    assert "Tensor? alpha=None" in str(op._schema)
    assert "float? low=None, float? high=None" in str(op._schema)
    assert "alpha" not in str(torch.ops.overweave.matmul_all_reduce.default._schema)


def compiled() -> list[bool]:
    toy_epilogue.add()
    torch.manual_seed(5)
    inputs = [torch.randn(shape) for shape in ((M, K), (K, N), (N,))]
    mine, exact = ([each.clone().requires_grad_() for each in inputs] for _ in range(2))
    call = torch.compile(
        lambda x, w, alpha: ow.matmul_all_reduce(x, w, alpha=alpha, **LIMITS), fullgraph=True, backend="aot_eager"
    )
    y, wanted = call(*mine), in_torch(exact[0] @ exact[1], (exact[2], LOW, HIGH))
    for each in (y, wanted):
        each.sum().backward()
    gradients = [(one.grad, other.grad) for one, other in zip(mine, exact, strict=True)]
    return [torch.allclose(one, other, atol=1e-4) for one, other in ((y, wanted), *gradients)]


@pytest.mark.slow
def test_a_compiler_reads_it():
    assert run_ranks(compiled, 1) == [[True] * 4]


def words_for_bad_calls() -> list[str]:
    toy_epilogue.add()
    x, w, alpha, said = torch.ones(2, K), torch.ones(K, N), torch.ones(N), []
    for given in (
        {"alpha": alpha, "low": 0.0},
        {"alpha": alpha[:3], **LIMITS},
        {"alpha": alpha, "low": float("nan"), "high": 1.0},
        {"alpha": alpha, "low": "none", "high": 1.0},
        {"alpha": alpha, **LIMITS, "norm": ow.RmsNorm(alpha)},
    ):
        with pytest.raises(InputError) as refused:
            ow.matmul_all_reduce(x, w, **given)
        said.append(str(refused.value))
    return said


def test_bad_calls_are_typed_errors():
    words = ("high=: scaled_clamp needs it", "Pass [24]", "finite", "got str", "beside a norm")
    for said in run_ranks(words_for_bad_calls, 2):
        assert all(word in each for word, each in zip(words, said, strict=True)), said


def over_several_weights() -> bool:
    """Each weight's columns have their own part of alpha, in values and in gradients."""
    toy_epilogue.add()
    torch.manual_seed(0)
    x, w, alpha = torch.randn(M, K), torch.randn(K, N), torch.randn(N)
    own = x.chunk(dist.get_world_size())[dist.get_rank()]
    leaves = [own, w.requires_grad_(), alpha.requires_grad_()]
    parts = [each.contiguous() for each in w.split((16, N - 16), 1)]
    y = torch.cat(ow.all_gather_matmul(own, parts, alpha=alpha, m=M, **LIMITS), 1)
    with torch.no_grad():
        plain = torch.cat(ow.all_gather_matmul(own, parts, alpha=alpha, m=M, **LIMITS), 1)
    want = toy_epilogue.in_torch(x @ leaves[1], (leaves[2], *LIMITS.values()))
    found, wanted = (torch.autograd.grad(each.square().sum(), leaves[1:]) for each in (y, want))
    pairs = ((plain, want), (y, want), *zip(found, wanted, strict=True))
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in pairs)


def test_it_follows_several_weights():
    assert run_ranks(over_several_weights, 2) == [True, True]
    build("all_gather_matmul.push", problem("all_gather_matmul", columns=(16, 8)), {})


def test_another_operator_is_refused():
    with pytest.raises(InputError, match="takes no alpha"):
        build("matmul_all_to_all.sequential", problem("matmul_all_to_all", 12), {})


def test_the_tuner_knows_it_and_the_model_charges_its_bytes():
    asked = replace(problem("matmul_all_reduce"), epilogue=Epilogue())
    assert with_epilogue(asked, after="bias+scaled_clamp").epilogue.added == (Applied("scaled_clamp", (-1.0, 1.0)),)
    assert "scaled_clamp" in str(ow.explain("matmul_all_reduce", m=64, n=N, k=K, world_size=2, after="scaled_clamp"))
    register(replace(FORM, name="of_rows", inputs=(Input("of_rows", "y"),), numbers={}))
    for name in ("all_gather_matmul.push", "matmul_reduce_scatter.scatter", "matmul_all_reduce.two_shot"):
        bare = replace(problem(name.split(".")[0], 4096), n=16384, k=64, world_size=2, dtype="bfloat16")
        ends = Epilogue(), Epilogue(residual=True), Epilogue(more=(Applied("of_rows"),))
        plans = [build(name, replace(bare, epilogue=each), {"kernel": "hopper"}) for each in ends]
        alone_us, *others_us = [total_us(plan, load("h200x4")) for plan in plans]
        assert others_us == [others_us[0]] * 2
        assert others_us[0] > alone_us


@pytest.mark.parametrize(
    "changes",
    [{"name": "norm"}, {"name": "no name"}, {"device": None}, {"reference": None}, {"numbers": {"x": 1.0}}],
)
def test_a_record_that_nothing_serves_is_refused(changes: dict[str, Any]):
    with pytest.raises(InputError, match="register the epilogue"):
        register(replace(FORM, **{"name": "other", "inputs": (), "numbers": {"beta": 1.0}} | changes))


def test_one_that_nobody_registered_is_refused():
    with pytest.raises(InputError, match="nobody has registered it"):
        build("all_gather_matmul.push", problem("all_gather_matmul", epilogue=Epilogue(more=(Applied("other"),))), {})
    assert isinstance(FORM, Form)


@pytest.mark.gpu(2)
def test_gpus_do_it():
    ran = forked.run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", ON_GPUS, timeout=240)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]


@pytest.mark.slow
def test_kernels_do_it():
    """Interpreted, in a process that interprets."""
    ran = forked.run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/extending/interpreted_epilogue.py")
    assert ran.returncode == 0, ran.stdout[-4000:]
