"""Several weights in one table, and gates: the real kernels, interpreted.

Run by test_interpreter.py in a process of its own, as interpreted_kernels.py is.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from overweave.runtime import interpreter

interpreter.repair()

from campaigns.exactness import Case, compute, make_data  # noqa: E402
from overweave.ir.epilogue import Epilogue  # noqa: E402
from overweave.ir.plan import Problem  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.runtime.epilogue import apply_epilogue  # noqa: E402
from overweave.runtime.host import run_on_host  # noqa: E402
from overweave.runtime.processes import run_ranks  # noqa: E402
from overweave.schedules import catalog  # noqa: E402


def run_several_weights() -> list[str]:
    """One table of tiles of two and three weights: in both layouts, cut tiles among them, and fewer rows than ranks."""
    group, wrong = resolve(None), []
    cut = {"block_n": 128, "split_n": 2, "sms": 6}
    for schedule, m, columns, options in (
        ("push", 37, (24, 64), {"pieces": 2}),
        ("push", 37, (200, 8, 40), cut),
        ("push", 75, (8, 104), {"mover": "copy_kernel", "copy_programs": 1}),
        ("pull", 50, (40, 8, 16), {"pieces": 2}),
        ("push", 1, (8, 8, 8), {}),
        ("push", 0, (8, 16), {}),
    ):
        problem = Problem(
            operator="all_gather_matmul",
            m=m,
            n=sum(columns),
            k=16,
            world_size=group.world_size,
            dtype="bfloat16",
            b_is_transposed=len(columns) == 3,
            columns=columns,
        )
        case = Case(f"all_gather_matmul.{schedule}", problem, {"block_m": 16, "block_n": 32, **options}, seed=m)
        plan = catalog.build(case.schedule, problem, case.options)
        assert not m or {row.weight for row in plan.tile_order(group.rank, "tiles").rows} == set(range(len(columns)))
        for call in range(2):
            data = make_data(case, group.rank, is_integer=True, call=call)
            if not torch.equal(compute(case, plan, group, data, "interpreter"), data.exact.bfloat16()):
                wrong.append(f"{case} call {call}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_tiles_of_several_weights_are_exact(world_size: int):
    assert run_ranks(run_several_weights, world_size) == [[]] * world_size


def run_gated() -> list[str]:
    """Two products of each tile, in both layouts, with and without a residual, in ragged tiles."""
    group, wrong = resolve(None), []
    torch.manual_seed(group.rank)
    rows, n, k = 20, 40, 24
    x, w, gate = torch.randn(rows, k).bfloat16(), torch.randn(k, n).bfloat16(), torch.randn(k, n).bfloat16()
    m = rows * group.world_size
    residual, gathered = torch.randn(m, n).bfloat16(), torch.empty(m, k)
    dist.all_gather_into_tensor(gathered, x.float())
    for activation, has_residual, is_transposed in (("silu", False, False), ("gelu", True, True), (None, False, True)):
        epilogue = Epilogue(activation=activation, residual=has_residual, gate=True)
        shape = {"m": m, "n": n, "k": k, "world_size": group.world_size, "dtype": "bfloat16"}
        problem = Problem(operator="all_gather_matmul", epilogue=epilogue, b_is_transposed=is_transposed, **shape)
        plan = catalog.build("all_gather_matmul.push", problem, {"block_m": 16, "block_n": 32, "block_k": 16})
        weights = {"w": w, "gate": gate}
        if is_transposed:
            weights = {name: each.t().contiguous().t() for name, each in weights.items()}
        extras = {"residual": residual} if has_residual else {}
        y = torch.full((m, n), torch.nan).bfloat16()
        run_on_host(plan, group, {"x": x, **weights, **extras}, {"y": y}, depth="interpreter")
        exact, wide = gathered @ w.float(), {name: each.float() for name, each in extras.items()}
        apply_epilogue(exact, slice(0, m), epilogue, wide, gathered @ gate.float())
        if not torch.allclose(y.float(), exact, rtol=2**-7, atol=2**-7):  # one rounding
            wrong.append(f"{activation}: {float((y.float() - exact).abs().max())}")
    return wrong


def test_kernels_gate_their_tiles():
    assert run_ranks(run_gated, 2) == [[]] * 2
