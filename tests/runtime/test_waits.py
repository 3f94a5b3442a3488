"""What the caller's stream waits for, and what only streams beside it would wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from overweave import Reduction
from overweave.ir.plan import COPY_ENGINE, LIBRARY, Plan, Problem
from overweave.ir.schedule import Wait
from overweave.ir.verify.deadlock import launch_order
from overweave.ir.verify.graphs import build_graph
from overweave.ir.verify.happens_before import past_of
from overweave.ir.verify.verdict import Findings
from overweave.memory.layout import lay_out
from overweave.ops.compile import compile
from overweave.runtime import waits
from overweave.runtime.waits import PlanWaits, Signals, neighbours, paired, unheard
from overweave.schedules import catalog
from tests.runtime.test_bind_compiled import BLOCKS, K, M, N, by_hand
from tests.runtime.without_gpu import SIDE_STREAM
from tests.source_tree import ROOT

NOBODY = (-1, 0)


def planned(name: str, world_size: int, m: int = 512, **options: int | str) -> Plan:
    sizes = {"m": m, "n": 512, "k": 512, "dtype": "bfloat16"}
    problem = Problem(operator=name.split(".")[0], world_size=world_size, **sizes)  # type: ignore[arg-type]
    return catalog.build(name, problem, options)


def test_neighbours_that_count_alike_are_one_range():
    assert neighbours({}) == []
    counts = {7: 1, 1: 1, 2: 1, 3: 2, 4: 2, 6: 1}
    assert neighbours(counts) == [Signals(1, 3, 1), Signals(3, 5, 2), Signals(6, 8, 1)]


@pytest.mark.parametrize(
    ("counts", "launches"),
    [
        ({}, []),
        ({4: 1}, [(4, 5, 1, *NOBODY)]),
        ({4: 1, 5: 1, 6: 1}, [(4, 7, 1, *NOBODY)]),
        ({4: 1, 6: 3}, [(6, 7, 3, 4, 1)]),
        ({1: 2, 4: 1, 5: 1, 6: 1}, [(4, 7, 1, 1, 2)]),
        ({1: 1, 2: 1, 4: 1, 5: 1, 6: 1}, [(4, 7, 1, *NOBODY), (1, 3, 1, *NOBODY)]),
        ({0: 1, 2: 2, 4: 3, 6: 1, 7: 1}, [(6, 8, 1, 0, 1), (4, 5, 3, 2, 2)]),
    ],
    ids=str,
)
def test_a_kernel_waits_for_a_range_and_for_one_more(counts: dict[int, int], launches: list[tuple[int, ...]]):
    found = list(paired(neighbours(counts)))
    assert found == launches
    told = [(number, full) for low, high, full, *_ in found for number in range(low, high)]
    told += [(also, full) for *_, also, full in found if also >= 0]
    assert sorted(told) == sorted(counts.items())


GOT = ({"sharing": "get"}, {"sharing": "get", "sums": "epilogue"})


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("m", [3, 512, 4096])
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in catalog.names()), *(("matmul_all_reduce.two_shot", options) for options in GOT)],
)
def test_every_wait_of_a_stream_is_heard_of_by_a_kernel_or_waited_for_by_one(
    name: str, options: dict[str, str], m: int, world_size: int
):
    check_unheard(planned(name, world_size, m, **options))


@pytest.mark.parametrize(
    "exchanges",
    [
        *({"A": f"all_gather.{how}"} for how in ("push", "pull", "ring", "double_ring", "islands", "mesh lanes=2")),
        *({"C": f"reduce_scatter.{how}"} for how in ("scatter", "ring", "double_ring", "islands", "mesh")),
        *({"C": f"all_reduce.{how}"} for how in ("one_shot", "two_shot", "ring", "mesh")),
        {"A": "all_to_all.receive", "C": "all_to_all.send"},
        {"C": by_hand(everywhere=True)},
    ],
    ids=str,
)
def test_the_same_of_compiled_kernels(exchanges: dict[str, Any]):
    fused = compile(f"{ROOT}/examples/kernels/matmul.py:matmul_kernel", exchanges)
    for world_size in (2,) if isinstance(exchanges.get("C"), Reduction) else (2, 4):
        check_unheard(fused.plan({"M": M, "N": N, "K": K, **BLOCKS}, world_size, "bfloat16", 0))


def check_unheard(plan: Plan) -> None:
    """Against the proof: with all kernels of a rank, what its streams beside them wait for has come, or is listed."""
    findings = Findings()
    graph = build_graph(plan.schedule, findings)
    order = launch_order(graph, findings)
    assert order is not None
    past = past_of(graph, order)
    engines = {queue.name: plan.realization.engine_of(queue.name) for queue in plan.schedule.queues}
    for rank, positions in enumerate(graph.of_rank):
        before = 0
        for at in positions:
            if engines[graph.operations[at].queue] != COPY_ENGINE:
                before |= past.before[at] | past.late.get(at, 0)
        missed = set()
        for at in positions:
            operation = graph.operations[at]
            for wait in operation.all_waits if engines[operation.queue] == COPY_ENGINE else ():
                keys = {graph.key(wait.pad, rank, signal) for signal in range(*wait.signals)}
                makers = [maker for maker, told in enumerate(graph.notified) if keys & set(told)]
                if any(graph.operations[one].rank != rank and not past.bit[one] & before for one in makers):
                    missed.add(wait)
        assert set(unheard(plan, rank)) == missed


def test_what_is_told_by_copies_in_a_row_is_heard_of_with_the_last():
    """The first of two pieces is too small for a tile: only the copy engine waits for it, so that it may be reset."""
    plan = planned("all_gather_matmul.push", 4)
    idle = [operation for operation in plan.schedule.of_rank(0) if operation.name.startswith("idle")]
    assert any(operation.waits for operation in idle)
    assert not unheard(plan, 0)


def test_what_is_got_last_is_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch):
    plan = planned("matmul_all_reduce.two_shot_stored", 2)
    assert unheard(plan, 0) == (Wait("shared", (2, 3), 1), Wait("shared", (3, 4), 1))
    layout, launches = lay_out(plan.schedule, "bfloat16"), caught(monkeypatch)
    (end,) = PlanWaits(plan, 0, layout, ARRAYS).at_end()
    end(SIDE_STREAM, "tensors", "addresses")
    first = layout.signal("shared", 2)
    assert launches == [(5, [first, first + 2, 1, *NOBODY, -3, layout.signals, 2])]
    assert PlanWaits(planned("matmul_all_reduce.two_shot", 2), 0, layout, ARRAYS).at_end() == ()


def test_a_report_names_the_operation_by_its_place_in_its_queue(monkeypatch: pytest.MonkeyPatch):
    plan = planned("all_gather_matmul.per_shard", 3)
    layout, launches = lay_out(plan.schedule, "bfloat16"), caught(monkeypatch)
    bound, expected = PlanWaits(plan, 1, layout, ARRAYS), []
    by_library = [one for one in plan.schedule.of_rank(1) if plan.realization.engine_of(one.queue) == LIBRARY]
    for number, operation in enumerate(by_library):
        bound.of(operation)(number)
        for wait in operation.all_waits:
            low, high = (layout.signal(wait.pad, end) for end in wait.signals)
            expected.append((number, [low, high, wait.count, *NOBODY, number, layout.signals, 3]))
    assert launches == expected
    assert len(expected) >= 2


ARRAYS: Any = [SimpleNamespace(name=name) for name in ("signals", "words", "limits")]


def caught(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """(stream, numbers) of every launch."""
    launches: list[tuple[int, list[int]]] = []

    def launch(arrays: Any, numbers: list[int]) -> Any:
        assert arrays is ARRAYS
        return lambda stream: launches.append((stream, numbers))

    monkeypatch.setattr(waits, "wait_launch", launch)
    return launches
