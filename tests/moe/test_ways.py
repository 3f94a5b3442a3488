"""Every way to compute a layer of experts, on emulated ranks: they agree, and one that is wrong is left out."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from overweave import moe
from overweave.memory.group import resolve
from overweave.moe import ways
from overweave.moe.cases import EXPERTS, ExpertsCase, Parallel, RoutingStatistics
from overweave.moe.ways import LIBRARY, LayerSetup, layer_runs
from overweave.schedules.records.experts import PLANS, SEQUENTIAL
from overweave.tuner.measure import trial
from overweave.tuner.measure.baselines import OURS
from overweave.tuner.measure.bench import BenchRequest, BenchRun, summarize_groups
from overweave.tuner.measure.timer import Effort
from overweave.tuner.measure.trial import CheckedCall
from overweave.tuner.space.shapes import DtypeWord
from tests.ranks import run_ranks

OVERLAPPED = [plan for plan in PLANS if plan != SEQUENTIAL]


def case(parallel: Parallel, experts: int = 5) -> ExpertsCase:
    return ExpertsCase("a", 16, 32, parallel, RoutingStatistics(6, experts, min(2, experts), 0.8))


def run(parallel: Parallel, plans: tuple[str, ...] = (), experts: int = 5, dtype: DtypeWord = "fp32") -> BenchRun:
    effort = Effort(rounds=2, warmup=1)
    request = BenchRequest(operator=EXPERTS, device="cpu", dtype=dtype, plans=plans, effort=effort)
    (found,) = layer_runs((case(parallel, experts),), request, resolve(None))
    return found


def rows(
    parallel: Parallel, plans: tuple[str, ...] = (), experts: int = 5, dtype: DtypeWord = "fp32"
) -> list[list[str]]:
    """For `run_ranks`: the plans of ours that ran, all rows, and what was left out."""
    (measured,) = run(parallel, plans, experts, dtype).cases
    names = [row.name for row in measured.methods]
    return [[row.plan for row in measured.methods if row.plan], names, [*measured.left_out.values()]]


@pytest.mark.slow
def test_all_ways_of_a_split_layer_agree():
    for ran, names, left_out in run_ranks(rows, 2, "tensor"):
        assert (ran, left_out) == ([*PLANS, *OVERLAPPED], [])
        assert OURS in names


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "experts"), [(2, 5), (3, 2)])  # some of three ranks hold none
def test_all_ways_of_whole_experts_agree(ranks: int, experts: int):
    for ran, names, left_out in run_ranks(rows, ranks, "expert", (), experts):
        assert (ran, left_out) == ([*PLANS, "dispatch"], [])
        assert {OURS, "all_to_all"} <= set(names)


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "ran"), [("tensor", [SEQUENTIAL]), ("expert", [SEQUENTIAL, "dispatch"])])
def test_ways_in_fp8_agree_with_each_other_and_stand_beside_the_librarys(parallel: Parallel, ran: list[str]):
    for found, names, left_out in run_ranks(rows, 2, parallel, (), 5, "fp8"):
        assert (found, left_out) == (ran, [])
        assert {OURS, LIBRARY.name} <= set(names)


def spoiled() -> list[str]:
    """With a way that forgets the router's weights, on one rank."""

    def forgetful(setup: LayerSetup, sample: int, plan: str | None) -> torch.Tensor:
        x, ids, topk_weights = setup.given(sample)
        given = topk_weights if setup.group.rank else torch.ones_like(topk_weights)
        return moe.experts_mlp(x, ids, given, setup.weights, setup.group.process_group, plan=plan)

    with patch.object(LayerSetup, "by_plan", forgetful):
        (measured,) = run("tensor", (SEQUENTIAL,)).cases
    return list(measured.left_out.values())


@pytest.mark.slow
def test_a_way_that_is_wrong_on_one_rank_is_left_out_on_all():
    first, second = run_ranks(spoiled, 2)
    assert first == ["its result differs from the sequential one"]
    assert second == ["it failed on another rank"]


def summarized() -> list[str]:
    (group,) = summarize_groups(run("tensor", (SEQUENTIAL,)))
    assert group.ceiling is not None
    return [group.group, str(group.cases), str(0 < group.slowest <= group.speedup * (1 + 1e-9))]


@pytest.mark.slow
def test_the_quickest_of_ours_is_summed_up_by_group():
    assert run_ranks(summarized, 2) == [["tensor parallel, at most 512 tokens", "1", "True"]] * 2


def captured() -> list[int | bool]:
    """With a stand-in for capturing: how many ways were captured, and whether the rows say so."""
    asked: list[CheckedCall] = []

    def replayed(call: CheckedCall) -> CheckedCall:
        asked.append(call)
        return call

    with (
        patch.object(ways, "_is_captured", lambda group, device: True),
        patch.object(trial, "capture_graphs", replayed),
    ):
        (measured,) = run("expert", (SEQUENTIAL,)).cases
    return [len(asked), len(measured.methods), measured.is_replayed]


@pytest.mark.slow
def test_all_ways_run_as_graphs_but_those_whose_host_reads_counts():
    assert run_ranks(captured, 2) == [[4, 6, True]] * 2


def test_a_plan_that_is_asked_for_stands_alone():
    named = [way.plan for way in ways.ways_of(case("tensor"), (SEQUENTIAL,))]
    assert [plan for plan in named if plan] == [SEQUENTIAL]
    assert LIBRARY in ways.ways_of(case("expert"), (SEQUENTIAL,))
