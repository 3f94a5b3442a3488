"""A toy epilogue in the kernels themselves, interpreted. Run by test_toy_epilogue.py in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from overweave.ir.epilogue import Applied, Epilogue  # noqa: E402
from overweave.ir.operators.forms import Form, Input  # noqa: E402
from overweave.ir.problem import Problem  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.ops.dispatch.library import register_epilogue  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from overweave.runtime.host.host import run_on_host  # noqa: E402
from overweave.schedules.catalog import catalog  # noqa: E402
from tests.extending import toy_epilogue  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

load("host interpreter")  # here, once, and not in every rank

TILES: dict[str, Any] = {"block_m": 16, "block_n": 16}
PLANS: dict[str, dict[str, Any]] = {
    "all_gather_matmul.push": TILES,
    "matmul_all_reduce.two_shot": TILES,
    "matmul_all_reduce.two_shot sums=epilogue": {"sums": "epilogue", **TILES},
    "matmul_all_reduce.one_shot_packed": {},
    "matmul_reduce_scatter.scatter": TILES,
    "matmul_reduce_scatter.fused_ring": TILES,
    "matmul_reduce_scatter.ring_stored": TILES,
    "matmul_reduce_scatter.scatter_packed": {},
}
M, N, K = 19, 40, 16
MORE = Applied("scaled_clamp", (-3.0, 5.0)), Applied("beside_all", (2.0,))
ENDS = Epilogue(bias=True, residual=True, more=MORE)


def beside_all(value, beside):  # type: ignore[no-untyped-def]
    """In torch and on the device."""
    return value * beside[0] + beside[1] * beside[2] + beside[3]


READS = Input("places", "y"), Input("by_row", "y", "1", "float32"), Input("for_all", cols="1", dtype="float32")
BESIDE_ALL = Form(name="beside_all", inputs=READS, numbers={"nu": 1.0}, reference=beside_all, device=beside_all)


def wrong(dtype: str, scaled_by: tuple[float, float]) -> list[str]:
    """The plans whose small integers, scaled by powers of two, are not those of plain torch."""
    toy_epilogue.add()
    register_epilogue(BESIDE_ALL)
    group, found, own = resolve(None), [], getattr(torch, dtype)
    for name, options in PLANS.items():
        torch.manual_seed(1)
        bias, residual = torch.randint(-2, 3, (1, N)).to(own), torch.randint(-2, 3, (M, N)).to(own)
        alpha = torch.tensor([scaled_by]).repeat(1, N // 2).to(own)
        places, by_row, for_all = torch.randint(-1, 2, (M, N)).to(own), torch.arange(M)[:, None] % 3, torch.ones(1, 1)
        operator = name.partition(".")[0]
        torch.manual_seed(1 if operator == "all_gather_matmul" else group.rank)
        whole, w = torch.randint(-1, 2, (M, K)).to(own), torch.randint(-1, 2, (K, N)).to(own)
        problem = Problem(operator=operator, m=M, n=N, k=K, world_size=group.world_size, dtype=dtype, epilogue=ENDS)
        plan = catalog.build(name.split()[0], problem, options)
        rows = slice(*problem.result_ranges(group.rank)[0])
        x = whole[slice(*problem.operand_ranges(group.rank)[0])]
        beside = {"places": places[rows], "by_row": by_row[rows].float(), "for_all": for_all}
        inputs = {"x": x, "w": w, "bias": bias, "residual": residual[rows], "alpha": alpha, **beside}
        outputs = {"y": torch.full((problem.result_rows(group.rank), N), torch.nan, dtype=own)}
        run_on_host(plan, group, inputs, outputs, depth="interpreter")
        total = whole.float() @ w.float()
        if problem.record.adds:
            torch.distributed.all_reduce(total)
        exact = toy_epilogue.in_torch((total + bias + residual)[rows], (alpha, -3.0, 5.0))
        exact = beside_all(exact, (*beside.values(), 2.0)).to(own)
        if not torch.equal(outputs["y"], exact):
            found.append(f"{name} {dtype}")
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_way_in_which_kernels_end(dtype: str):
    assert run_ranks(wrong, 2, dtype, (0.5, 2.0), timeout_s=120) == [[]] * 2


def test_another_number_is_another_kernel():
    from overweave.kernels.epilogue import epilogue_code

    toy_epilogue.add()
    codes = {epilogue_code(replace(ENDS, more=(Applied("scaled_clamp", (-3.0, high)),))) for high in (5.0, 6.0)}
    assert len(codes) == 2
