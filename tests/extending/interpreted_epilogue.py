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
from overweave.ops.call.prepared import outputs_of  # noqa: E402
from overweave.ops.dispatch.library import register_epilogue  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from overweave.runtime.host.host import run_on_host  # noqa: E402
from overweave.schedules.catalog import catalog  # noqa: E402
from tests.extending import toy_epilogue, toy_rows  # noqa: E402
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


ROW_PLANS = ("two_shot", "one_shot_packed", "two_shot_packed")  # of an all-reduce; and their like of a reduce-scatter
FP8 = {"rows": Applied("fp8_rows", (448.0, 1e-12))}


def ended(name: str, form: dict[str, Any], given: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple[Any, Any]:
    """What a plan makes of a form, interpreted; and the exact sum, with the own rows. given: what it reads."""
    group, operator = resolve(None), name.partition(".")[0]
    torch.manual_seed(1 if operator == "all_gather_matmul" else group.rank)
    whole, w = torch.randint(-1, 2, (M, K)).to(dtype), torch.randint(-1, 2, (K, N)).to(dtype)
    words = str(dtype).removeprefix("torch.")
    problem = Problem(operator=operator, m=M, n=N, k=K, world_size=group.world_size, dtype=words, **form)
    plan = catalog.build(name.split()[0], problem, PLANS.get(name, {} if "packed" in name else TILES))
    rows = slice(*problem.result_ranges(group.rank)[0])
    read = {key: each[rows] if len(each) == M else each for key, each in given.items()}
    outputs = {
        key: torch.full(shape, torch.nan, dtype=torch.float32).to(kept)
        for key, shape, kept in outputs_of(problem, group.rank)
    }
    inputs = {"x": whole[slice(*problem.operand_ranges(group.rank)[0])], "w": w, **read}
    run_on_host(plan, group, inputs, outputs, depth="interpreter")
    total = whole.float() @ w.float()
    if problem.record.adds:
        torch.distributed.all_reduce(total)
    return outputs, (total, rows)


def wrong(dtype: str, scaled_by: tuple[float, float]) -> list[str]:
    """The plans whose small integers, scaled by powers of two, are not those of plain torch."""
    toy_epilogue.add()
    register_epilogue(BESIDE_ALL)
    found, own = [], getattr(torch, dtype)
    for name in PLANS:
        torch.manual_seed(1)
        bias, residual = torch.randint(-2, 3, (1, N)).to(own), torch.randint(-2, 3, (M, N)).to(own)
        alpha = torch.tensor([scaled_by]).repeat(1, N // 2).to(own)
        places, by_row, for_all = torch.randint(-1, 2, (M, N)).to(own), torch.arange(M)[:, None] % 3, torch.ones(1, 1)
        beside = {"places": places, "by_row": by_row.float(), "for_all": for_all}
        given = {"bias": bias, "residual": residual, "alpha": alpha, **beside}
        outputs, (total, rows) = ended(name, {"epilogue": ENDS}, given, own)
        exact = toy_epilogue.in_torch((total + bias + residual)[rows], (alpha, -3.0, 5.0))
        read = (places[rows], by_row[rows].float(), for_all, 2.0)
        found += [] if torch.equal(outputs["y"], beside_all(exact, read).to(own)) else [f"{name} {dtype}"]
    return found


def wrong_parts(dtype: str) -> list[str]:
    """As `wrong`, of what is done to each rank's product, and of rows that are quantised."""
    toy_rows.add()
    found, own = [], getattr(torch, dtype)
    bias, beta = torch.arange(N)[None].to(own) % 3, torch.tensor([[0.5, 2.0]]).repeat(1, N // 2).to(own)
    parts = (Applied("scaled_parts", (), True),)
    for name in PLANS if resolve(None).world_size > 1 else ():
        if name.startswith("all_gather"):
            continue
        epilogue = Epilogue(bias=True, activation="silu", more=parts)
        outputs, (total, rows) = ended(name, {"epilogue": epilogue}, {"bias": bias, "beta": beta}, own)
        exact = torch.nn.functional.silu(total[rows] * beta.float() + bias.float())
        found += [] if torch.allclose(outputs["y"].float(), exact, atol=0.02, rtol=0.01) else [f"{name} {dtype}"]
    for name in [f"matmul_all_reduce.{each}" for each in ROW_PLANS] + [
        f"matmul_reduce_scatter.scatter{each}" for each in ("", "_packed")
    ]:
        outputs, (total, rows) = ended(name, {"epilogue": Epilogue(more=parts), **FP8}, {"beta": beta}, own)
        values, scales = toy_rows.quantised((total * beta.float()).to(own)[rows], FP8["rows"].numbers)
        same = torch.equal(outputs["scales"], scales) and torch.equal(outputs["values"].float(), values.float())
        found += [] if same else [f"{name} {dtype} rows"]
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_way_in_which_kernels_end(dtype: str):
    assert run_ranks(wrong, 2, dtype, (0.5, 2.0), timeout_s=120) == [[]] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parts_and_whole_rows(dtype: str):
    assert run_ranks(wrong_parts, 2, dtype, timeout_s=120) == [[]] * 2


def test_another_number_is_another_kernel():
    from overweave.kernels.epilogue import epilogue_code

    toy_epilogue.add()
    codes = {epilogue_code(replace(ENDS, more=(Applied("scaled_clamp", (-3.0, high)),))) for high in (5.0, 6.0)}
    assert len(codes) == 2
