"""The reduction kernel that ends with a norm, interpreted: every plan that has it, from one rank to three.

Run by test_interpreter.py in a process of its own.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from overweave.runtime import interpreter

interpreter.repair()

from overweave.ir.epilogue import Norm  # noqa: E402
from overweave.ir.plan import Plan  # noqa: E402
from overweave.ir.problem import Problem  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from overweave.runtime.host.host import run_on_host  # noqa: E402
from overweave.schedules.catalog import catalog  # noqa: E402
from tests.ops import reference  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

load("host interpreter")  # here, once, and not in every rank

TILES: dict[str, Any] = {"block_m": 16, "block_n": 32}
PLANS: dict[str, dict[str, Any]] = {
    "one_shot_packed": {},
    "two_shot_packed": {},
    "two_shot": {"pieces": 2, **TILES},
    "waves": {"sms": 5, "library_sms": 2, **TILES},
}
K, EPS = 16, 1e-3


def in_parts(plan: Plan) -> Plan:
    """The plan, its rows summed and normed in four parts, the last of them empty; those of packed messages in turns."""
    if plan.realization.reduction is None:
        return plan
    sums = replace(plan.realization.reduction, parts=4)
    return replace(plan, realization=replace(plan.realization, reduction=sums))


def run_norms(names: tuple[str, ...], dtype: str, ms: tuple[int, ...], n: int = 40) -> list[str]:
    """Integers, so that z is exact in every plan; the norm of z may differ in its last bit."""
    group, wrong = resolve(None), []
    own = getattr(torch, dtype)
    for name, has_residual, m in product(names, (False, True), ms):
        torch.manual_seed(m)
        weight, residual = torch.randn(1, n).to(own), torch.randn(m, n).to(own)
        torch.manual_seed(group.rank + 1)
        x, w = torch.randint(-1, 2, (m, K)).to(own), torch.randint(-1, 2, (K, n)).to(own)
        shape = {"m": m, "n": n, "k": K, "world_size": group.world_size, "dtype": dtype}
        problem = Problem(operator="matmul_all_reduce", norm=Norm(eps=EPS, residual=has_residual), **shape)
        plan = in_parts(catalog.build(f"matmul_all_reduce.{name}", problem, PLANS[name]))
        inputs = {"x": x, "w": w, "norm_weight": weight} | ({"residual": residual} if has_residual else {})
        outputs = {"y": torch.full((m, n), torch.nan, dtype=own), "z": torch.full((m, n), torch.nan, dtype=own)}
        run_on_host(plan, group, inputs, outputs, depth="interpreter")
        normed, z = reference.matmul_all_reduce_norm(x, w, weight[0], residual if has_residual else None, EPS)
        if not torch.equal(outputs["z"], z) or not torch.allclose(outputs["y"], normed, rtol=2**-7, atol=1e-6):
            wrong.append(f"{name} {dtype} m={m} residual={has_residual}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_plan(world_size: int):
    assert run_ranks(run_norms, world_size, tuple(PLANS), "bfloat16", (1, 19), timeout_s=120) == [[]] * world_size


def test_other_dtypes():
    for dtype in ("float16", "float32"):
        assert run_ranks(run_norms, 2, ("two_shot", "one_shot_packed"), dtype, (9,)) == [[]] * 2


def test_rows_of_many_turns():
    """Packed messages: a row takes a program of 16 messages seven turns, the last of them short."""
    names = ("one_shot_packed", "two_shot_packed")
    assert run_ranks(run_norms, 3, names, "float32", (5,), 296, timeout_s=120) == [[]] * 3
