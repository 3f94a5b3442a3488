"""What only streams beside the caller's would wait for."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from overweave import Reduction
from overweave.ir.launch.streams import streams_that_wait, waits_without_deadline
from overweave.ir.operators.registry import operator_of
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.verify.rules.deadlock import launch_order
from overweave.ir.verify.rules.graphs import build_graph
from overweave.ir.verify.rules.happens_before import NONE, past_of, union
from overweave.ir.verify.rules.verdict import Findings
from overweave.ops.author.compile import compile
from overweave.schedules.catalog import catalog
from tests.runtime.gpu.test_bind_compiled import BLOCKS, K, M, N, by_hand
from tests.source_tree import ROOT


def planned(name: str, world_size: int, m: int = 512, **options: int | str) -> Plan:
    sizes = {"m": operator_of(name.split(".")[0]).whole_rows(m, world_size), "n": 512, "k": 512, "dtype": "bfloat16"}
    problem = Problem(operator=name.split(".")[0], world_size=world_size, **sizes)  # type: ignore[arg-type]
    return catalog.build(name, problem, options)


@pytest.mark.slow
@pytest.mark.parametrize("name", catalog.names())
def test_every_wait_of_a_stream_is_heard_of_by_a_kernel_or_waited_for_by_one(name: str):
    for world_size, m in product((2, 3, 4), (3, 512, 4096)):
        check_unheard(planned(name, world_size, m))


@pytest.mark.slow
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
    streams = streams_that_wait(plan)
    for rank, positions in enumerate(graph.of_rank):
        before = NONE
        for at in positions:
            if graph.operations[at].queue not in streams:
                before = union((before, past.before[at], past.late.get(at, NONE)))
        missed = set()
        for at in positions:
            operation = graph.operations[at]
            for wait in operation.all_waits if operation.queue in streams else ():
                keys = {graph.key(wait.pad, rank, signal) for signal in range(*wait.signals)}
                makers = [maker for maker, told in enumerate(graph.notified) if keys & set(told)]
                if any(graph.operations[one].rank != rank and not past.has(before, one) for one in makers):
                    missed.add(wait)
        assert set(waits_without_deadline(plan, rank)) == missed


def test_what_has_no_rows_is_neither_sent_nor_waited_for():
    """The first of two pieces is too small for a tile."""
    plan = planned("all_gather_matmul.push", 4)
    assert all(part.shape[0] for operation in plan.schedule.operations for part in operation.writes)
    assert {operation.name for operation in plan.schedule.operations if operation.name.endswith(".1")} == set()
    assert not waits_without_deadline(plan, 0)
