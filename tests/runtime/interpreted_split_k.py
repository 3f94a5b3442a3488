"""Tiles that are dealt out along k: the real kernel, interpreted, in plans that wait for each other's signals.

Run by test_interpreter.py in a process of its own, as interpreted_kernels.py is.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from campaigns.exact.exactness import Case, compute, make_data  # noqa: E402
from overweave.ir.epilogue import Epilogue  # noqa: E402
from overweave.ir.problem import Problem  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from overweave.runtime.host.host import run_on_host  # noqa: E402
from overweave.runtime.library.epilogue import apply_epilogue  # noqa: E402
from overweave.schedules.catalog import catalog  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

load("host interpreter")  # here, once, and not in every rank

TILE = {"block_m": 16, "block_n": 32, "block_k": 16, "split_n": 1}
PLANS: tuple[tuple[str, dict[str, int | str]], ...] = (
    ("all_gather_matmul.push", {"pieces": 2, "split_k": 3, "sms": 64}),
    ("all_gather_matmul.push", {"split_k": 4, "sms": 7, "mover": "copy_kernel", "copy_programs": 1}),
    ("all_gather_matmul.pull", {"split_k": 3, "sms": 5}),
    ("matmul_reduce_scatter.scatter", {"pieces": 2, "split_k": 2, "sms": 10}),
    ("matmul_reduce_scatter.scatter", {"pieces": 2, "split_k": 4, "sms": 64, "sums": "epilogue"}),
    ("matmul_all_reduce.two_shot", {"split_k": 2, "sms": 64, "sums": "epilogue"}),
)


def run_plans() -> list[str]:
    """Every plan with tiles that are dealt out, on integers, whose sums are exact in any order; several calls."""
    group, wrong = resolve(None), []
    for name, options in PLANS:
        operator = name.split(".")[0]
        columns = (40, 24) if operator == "all_gather_matmul" else ()
        problem = Problem(
            operator=operator, m=37, n=64, k=248, world_size=group.world_size, dtype="bfloat16", columns=columns
        )
        case = Case(name, problem, {**TILE, **options}, seed=3)
        plan = catalog.build(name, problem, case.options)
        assert any(row.shares for row in plan.tile_order(group.rank, "tiles").rows), case
        for call in range(3):
            data = make_data(case, group.rank, is_integer=True, call=call)
            if not torch.equal(compute(case, plan, group, data, "interpreter"), data.exact.bfloat16()):
                wrong.append(f"{case} call {call}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_tiles_that_are_dealt_out_are_exact(world_size: int):
    assert run_ranks(run_plans, world_size) == [[]] * world_size


def run_epilogues() -> list[str]:
    """Two products of each tile and one, with what follows them; bits that are the same each time."""
    group, wrong = resolve(None), []
    torch.manual_seed(group.rank)
    rows, n, k = 20, 40, 128
    x, w, gate = torch.randn(rows, k).bfloat16(), torch.randn(k, n).bfloat16(), torch.randn(k, n).bfloat16()
    m = rows * group.world_size
    extras = {"residual": torch.randn(m, n).bfloat16(), "bias": torch.randn(1, n).bfloat16()}
    gathered = torch.empty(m, k)
    dist.all_gather_into_tensor(gathered, x.float())
    for epilogue in (
        Epilogue(activation="silu", residual=True, gate=True),
        Epilogue(activation="gelu", bias=True, residual=True),
    ):
        shape = {"m": m, "n": n, "k": k, "world_size": group.world_size, "dtype": "bfloat16"}
        problem = Problem(operator="all_gather_matmul", epilogue=epilogue, **shape)
        plan = catalog.build("all_gather_matmul.push", problem, {**TILE, "split_k": 2, "sms": 64})
        assert all(row.shares == 2 for row in plan.tile_order(group.rank, "tiles").rows)
        given = {"x": x, "w": w} | ({"gate": gate} if epilogue.gate else {})
        given |= {name: extras[name] for name in epilogue.inputs if name in extras}
        outs = [torch.full((m, n), torch.nan).bfloat16() for _ in range(2)]
        for y in outs:
            run_on_host(plan, group, given, {"y": y}, depth="interpreter")
        exact, wide = gathered @ w.float(), {name: each.float() for name, each in extras.items()}
        apply_epilogue(exact, slice(0, m), epilogue, wide, gathered @ gate.float() if epilogue.gate else None)
        if not torch.allclose(outs[0].float(), exact, rtol=2**-6, atol=2**-6):
            wrong.append(f"{epilogue}: {float((outs[0].float() - exact).abs().max())}")
        if not torch.equal(*outs):
            wrong.append(f"{epilogue}: other bits")
    return wrong


def test_sums_of_shares_are_finished_once():
    assert run_ranks(run_epilogues, 2) == [[]] * 2
