"""Plans on two levels by the actual kernels, interpreted: tiles wait for what the library's calls have brought.

Run by test_interpreter.py in a process of its own: where triton has been imported for compiling it cannot interpret.
"""

from __future__ import annotations

import pytest
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from overweave.ir.operators.registry import OPERATORS  # noqa: E402
from overweave.ir.problem import Problem  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.ops.reference import PlainCollectives  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from overweave.runtime.host.host import run_on_host  # noqa: E402
from overweave.schedules.catalog.catalog import build  # noqa: E402
from tests.islands import on_islands  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

load("host interpreter")  # here, once, and not in every rank

N, K = 32, 16


def wrong_calls(operator: str, islands: tuple[tuple[int, ...], ...], rows: int) -> list[int]:
    """Which of two calls are not exact."""
    group, record, wrong = resolve(None), OPERATORS[operator], []
    m = record.whole_rows(rows, group.world_size)
    problem = Problem(operator=operator, m=m, n=N, k=K, world_size=group.world_size, dtype="bfloat16", islands=islands)
    plan = build(f"{operator}.islands", problem, {"block_m": 16, "block_n": 16})
    generator = torch.Generator().manual_seed(group.rank)
    for call in range(2):
        shapes = {"x": (problem.operand_rows(group.rank), K), "w": (K, N)}
        inputs = {name: torch.randint(-2, 3, shape, generator=generator).bfloat16() for name, shape in shapes.items()}
        y = torch.empty(problem.result_rows(group.rank), N, dtype=torch.bfloat16)
        run_on_host(plan, group, inputs, {"y": y}, depth="interpreter")
        if not torch.equal(y, record.reference(inputs, PlainCollectives(group.process_group, m, 0))):
            wrong.append(call)
    return wrong


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(("names", "islands"), [("aabb", ((0, 1), (2, 3))), ("aba", ((0, 2), (1,)))])
def test_two_levels_are_exact(operator: str, names: str, islands: tuple[tuple[int, ...], ...]):
    assert run_ranks(on_islands, len(names), names, wrong_calls, operator, islands, 72) == [[]] * len(names)
