"""Sums that kernels finish, with the actual kernels, interpreted: bias, activation and residual in fp32, once.

Run by test_interpreter.py in a process of its own, as interpreted_kernels.py is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from overweave.ir.epilogue import Epilogue  # noqa: E402
from overweave.ir.problem import Problem  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from overweave.runtime.host.host import run_on_host  # noqa: E402
from overweave.schedules.catalog import catalog  # noqa: E402
from tests.ops import reference  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

load("host interpreter")  # here, once, and not in every rank

SCATTER, REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
TILES = {"block_m": 16, "block_n": 32, "pieces": 2}
PLANS: tuple[tuple[str, dict[str, Any]], ...] = (
    (f"{SCATTER}.scatter", TILES),
    (f"{SCATTER}.scatter", {"sums": "epilogue", **TILES}),
    (f"{SCATTER}.scatter", {"sums": "epilogue", "block_m": 16, "block_n": 128, "split_n": 2, "sms": 3, "pieces": 1}),
    (f"{SCATTER}.fused_ring", TILES),
    (f"{SCATTER}.scatter_stored", TILES),
    (f"{SCATTER}.ring_stored", TILES),
    (f"{SCATTER}.remote_add", TILES),
    (f"{SCATTER}.scatter_pull", TILES),
    (f"{SCATTER}.scatter_packed", {}),
    (f"{REDUCE}.one_shot_packed", {}),
    (f"{REDUCE}.two_shot_packed", {}),
    (f"{REDUCE}.two_shot", TILES),
    (f"{REDUCE}.ring_stored", TILES),
    (f"{REDUCE}.two_shot", {"sums": "epilogue", **TILES}),
)
N, K = 40, 16
EVERYTHING = Epilogue(bias=True, activation="silu", residual=True)
ADDED = Epilogue(bias=True, residual=True)


def run_sums(m: int, epilogue: Epilogue, dtype: str = "bfloat16", names: str = "") -> list[str]:
    """Of integers, what is not exact; behind an activation, what is off by more than a rounding."""
    group, wrong, own = resolve(None), [], getattr(torch, dtype)
    for name, options in PLANS:
        if names not in name:
            continue
        shape = {"m": m, "n": N, "k": K, "world_size": group.world_size, "dtype": dtype}
        problem = Problem(operator=name.split(".")[0], epilogue=epilogue, **shape)
        plan = catalog.build(name, problem, options)
        torch.manual_seed(m)
        bias = torch.randint(-8, 9, (1, N)).to(own)
        torch.manual_seed(m + (group.rank if problem.operator == SCATTER else 0))
        residual = torch.randint(-8, 9, (problem.result_rows(group.rank), N)).to(own)
        torch.manual_seed(1000 * m + group.rank)
        x, w = torch.randint(-1, 2, (m, K)).to(own), torch.randint(-1, 2, (K, N)).to(own)
        y = torch.full(residual.shape, torch.nan, dtype=own)
        extras = {name: tensor for name, tensor in (("bias", bias), ("residual", residual)) if name in epilogue.inputs}
        run_on_host(plan, group, {"x": x, "w": w, **extras}, {"y": y}, depth="interpreter")
        wide = {name: tensor.double() for name, tensor in extras.items()} | {"activation": epilogue.activation}
        exact = getattr(reference, problem.operator)(x.double(), w.double(), **wide)
        near = 2**-20 if dtype == "float32" else 2**-8
        is_near = torch.allclose(y.double(), exact, near, near)
        if not (is_near if epilogue.activation else torch.equal(y, exact.to(own))):
            wrong.append(f"{name} {options} m={m} {epilogue} {dtype}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_plan_that_a_kernel_finishes(world_size: int):
    for m, epilogue in ((1, EVERYTHING), (37, ADDED))[world_size - 2 :]:
        assert run_ranks(run_sums, world_size, m, epilogue, timeout_s=120) == [[]] * world_size


def test_other_dtypes_and_steps():
    for dtype, epilogue in (("float32", EVERYTHING), ("float16", Epilogue(activation="gelu"))):
        assert run_ranks(run_sums, 2, 9, epilogue, dtype, "packed") == [[]] * 2
        assert run_ranks(run_sums, 2, 9, epilogue, dtype, "fused_ring") == [[]] * 2
