"""Packed messages, interpreted: real kernels and real flags between processes. Run by test_interpreter.py."""

from __future__ import annotations

import pytest
import torch

from overweave.runtime import interpreter

interpreter.repair()

from campaigns.exactness import Case, compute, make_data  # noqa: E402
from overweave.ir.plan import Problem  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.runtime.processes import run_ranks  # noqa: E402
from overweave.schedules import catalog  # noqa: E402


def run_packed(calls: int) -> list[str]:
    """Messages that carry their flag: plans of other sizes and with slots between them, and memory that grows."""
    group, wrong = resolve(None), []
    cases = []
    for m, n, dtype in (
        (1, 8, "bfloat16"),
        (37, 40, "bfloat16"),
        (3, 24, "float32"),
        (5, 8, "float16"),
        (0, 8, "bfloat16"),
    ):
        for name in ("one_shot_packed", "two_shot_packed", "one_shot_pull"):
            shape = {"m": m, "n": n, "k": 16, "world_size": group.world_size, "dtype": dtype}
            problem = Problem(operator="matmul_all_reduce", **shape)
            case = Case(f"matmul_all_reduce.{name}", problem, {}, seed=m)
            cases.append((case, catalog.build(case.schedule, problem, {})))
    for call in range(calls):
        for case, plan in cases:
            data = make_data(case, group.rank, is_integer=True, call=call)
            found = compute(case, plan, group, data, "interpreter")
            if not torch.equal(found, data.exact.to(found.dtype)):
                wrong.append(f"{case} call {call}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_packed_messages_are_exact(world_size: int):
    assert run_ranks(run_packed, world_size, 4) == [[]] * world_size
