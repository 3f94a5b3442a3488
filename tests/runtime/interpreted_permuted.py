"""Kernels and permuted buffers: tiles stored block by block, and read through the map. Run by test_interpreter.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from campaigns.exact.exactness import Case, compute, make_data  # noqa: E402
from overweave.ir.problem import Problem  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from overweave.schedules.catalog import catalog  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

load("host interpreter")  # here, once, and not in every rank

TILES: dict[str, int | str] = {"block_m": 16, "block_n": 32, "block_k": 16, "sms": 6, "library_sms": 2}
TRIED: tuple[tuple[str, int, int, dict[str, int | str]], ...] = (
    ("matmul_all_reduce", 75, 72, {}),
    ("matmul_reduce_scatter", 99, 72, {}),
    ("matmul_all_reduce", 32, 32, {"groups": "1"}),
    ("matmul_reduce_scatter", 84, 72, {"rows": "cyclic"}),
)


def wrong_sums() -> list[str]:
    """Ragged rows and columns, calls in a row, in both layouts of the weight."""
    group, wrong = resolve(None), []
    for at, (operator, m, n, options) in enumerate(TRIED):
        shape = {"m": m, "n": n, "k": 24, "world_size": group.world_size, "dtype": "bfloat16"}
        problem = Problem(operator=operator, b_is_transposed=at == 1, **shape)
        case = Case(f"{operator}.waves", problem, TILES | options, seed=m)
        plan = catalog.build(case.schedule, problem, case.options)
        for call in range(2):
            data = make_data(replace(case, problem=plan.problem), group.rank, is_integer=True, call=call)
            if not torch.equal(compute(case, plan, group, data, "interpreter"), data.exact.bfloat16()):
                wrong.append(f"{case} call {call}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tiles_stored_block_by_block_are_exact(world_size: int):
    assert run_ranks(wrong_sums, world_size) == [[]] * world_size
