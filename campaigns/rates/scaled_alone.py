"""A matmul of fp8 with scales of rows by the Hopper kernel alone, as campaigns make it."""

from __future__ import annotations

import torch

from overweave.ir.dtype import FLOAT8
from overweave.ir.epilogue import Epilogue
from overweave.ir.operators.forms import SCALE_W, SCALE_X
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.tuner.calibrate.rates import Matmul

BY_ROWS = Epilogue(scaling="rows")
Scaled = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def scaled_operands(m: int, n: int, k: int) -> Scaled:
    """a `[m, k]`, b `[k, n]` stored as `[n, k]`, and the scales of rows and of columns. Small integers, and powers of
    two as scales: products are exact.
    """
    a = torch.randint(-1, 2, (m, k), device="cuda", dtype=torch.int8).to(torch.float8_e4m3fn)
    b = torch.randint(-1, 2, (n, k), device="cuda", dtype=torch.int8).to(torch.float8_e4m3fn).t()
    scales = (2.0 ** torch.randint(-2, 3, (size,), device="cuda") for size in (m, n))
    scale_x, scale_w = (one.float() for one in scales)
    return a, b, scale_x.reshape(m, 1), scale_w.reshape(1, n)


def scaled_plan(m: int, n: int, k: int, sms: int) -> Plan:
    """The gather's of a group of one, in the tile shape that the model takes."""
    problem = Problem(
        operator="all_gather_matmul", m=m, n=n, k=k, world_size=1, dtype=FLOAT8, out_dtype="bfloat16",
        b_is_transposed=True, epilogue=BY_ROWS,
    )  # fmt: skip
    return build("all_gather_matmul.push", problem, {"sms": sms, "kernel": "hopper"})


def scaled_matmul(operands: Scaled, sms: int) -> Matmul:
    """Ready to run, in the tile shape that the model takes."""
    a, b, scale_x, scale_w = operands
    (m, k), n = a.shape, b.shape[1]
    out = torch.full((m, n), float("nan"), device=a.device, dtype=torch.bfloat16)
    plan = scaled_plan(m, n, k, sms)
    assert plan.realization.matmul is not None
    extras = {SCALE_X: scale_x, SCALE_W: scale_w}
    return Matmul(plan.realization.matmul, plan.tile_orders[0].rows, a, b, out, BY_ROWS, extras)
