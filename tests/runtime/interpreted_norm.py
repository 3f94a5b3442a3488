"""The reduction kernel that ends with a norm, interpreted: every plan that has it, from one rank to three.

Run by test_interpreter.py in a process of its own.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from overweave.runtime.interpreted import interpreter

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
WAVES = {"sms": 5, "library_sms": 2, **TILES}
PLANS: dict[str, dict[str, Any]] = {
    "matmul_all_reduce.one_shot_packed": {},
    "matmul_all_reduce.two_shot_packed": {},
    "matmul_all_reduce.two_shot": {"pieces": 2, **TILES},
    "matmul_all_reduce.waves": WAVES,
    "matmul_reduce_scatter.scatter_packed": {},
    "matmul_reduce_scatter.scatter": {"pieces": 2, "own_pieces": 2, **TILES},
    "matmul_reduce_scatter.scatter_pull": TILES,
    "matmul_reduce_scatter.waves": WAVES,
    "matmul_reduce_scatter.waves rows=cyclic": {"rows": "cyclic", **WAVES},
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
        weight, whole = torch.randn(1, n).to(own), torch.randn(m, n).to(own)
        torch.manual_seed(group.rank + 1)
        x, w = torch.randint(-1, 2, (m, K)).to(own), torch.randint(-1, 2, (K, n)).to(own)
        problem = Problem(
            operator=name.partition(".")[0], m=m, n=n, k=K, world_size=group.world_size, dtype=dtype,
            norm=Norm(eps=EPS, residual=has_residual),
        )  # fmt: skip
        plan = in_parts(catalog.build(name.split()[0], problem, PLANS[name]))
        rows = torch.tensor([row for part in plan.problem.result_ranges(group.rank) for row in range(*part)]).long()
        residual = whole[rows]
        inputs = {"x": x, "w": w, "norm_weight": weight} | ({"residual": residual} if has_residual else {})
        outputs = {name: torch.full((len(rows), n), torch.nan, dtype=own) for name in ("y", "z")}
        run_on_host(plan, group, inputs, outputs, depth="interpreter")
        every = reference.matmul_all_reduce_norm(x, w, weight[0], whole if has_residual else None, EPS)
        normed, z = (each[rows] for each in every)
        if not torch.equal(outputs["z"], z) or not torch.allclose(outputs["y"], normed, rtol=2**-7, atol=1e-6):
            wrong.append(f"{name} {dtype} m={m} residual={has_residual}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_plan(world_size: int):
    names = tuple(name for name in PLANS if "cyclic" not in name)
    assert run_ranks(run_norms, world_size, names, "bfloat16", (1, 19), timeout_s=120) == [[]] * world_size


def test_rows_in_strips():
    """Whole strips, and lower ones in the last band."""
    names = ("matmul_reduce_scatter.waves rows=cyclic",)
    assert run_ranks(run_norms, 2, names, "bfloat16", (64, 46), timeout_s=120) == [[]] * 2


def test_other_dtypes():
    names = ("matmul_all_reduce.two_shot", "matmul_all_reduce.one_shot_packed", "matmul_reduce_scatter.scatter_packed")
    for dtype in ("float16", "float32"):
        assert run_ranks(run_norms, 2, names, dtype, (9,)) == [[]] * 2


def test_rows_of_many_turns():
    """Packed messages: a row takes a program of 16 messages seven turns, the last of them short."""
    names = tuple(name for name in PLANS if name.endswith("_packed"))
    assert run_ranks(run_norms, 3, names, "float32", (5,), 296, timeout_s=120) == [[]] * 3
