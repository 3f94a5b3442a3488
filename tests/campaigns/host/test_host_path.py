"""How much Python an eager call may be: functions entered, not time, so that no busy machine decides."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist

from campaigns.host.host_cases import CASES, GATHER, KERNEL, PACKED_SHARE, REDUCE, Case, call_of
from campaigns.host.host_path import MOST_WARM, SIZES, costs, counted, ready
from campaigns.host.no_gpu import Graph
from overweave.errors import InputError
from overweave.memory.board.board import Board

PUSH = Case(GATHER, f"push {KERNEL}")
# A call that replays a graph, one that a library runs whole, and one that is launched step by step.
MOST_REPLAYED, MOST_BY_LIBRARY, MOST_LAUNCHED = 15, 20, 66
MOST_OF_A_SHARD = 22  # of a plan with library calls for the shard of each rank


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with ready() as group, torch.no_grad():
        yield group


def most(case: Case, way: str) -> int:
    if way == "replayed":
        return MOST_REPLAYED
    if case.plan in ("per_shard", "per_peer"):
        return MOST_OF_A_SHARD * SIZES.ranks
    return MOST_BY_LIBRARY if case.plan == "sequential" or "packed" in case.plan else MOST_LAUNCHED


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_that_is_known_enters_few_functions(case: Case, group: dist.ProcessGroup):
    found = list(costs(case, group, calls=0))
    assert found[-1].way == "launched"
    for cost in found:
        assert cost.entered.calls <= most(case, cost.way), cost.entered.python.most_common()


@pytest.mark.parametrize(("m", "is_graph"), [(64, True), (512, False)])
def test_packed_messages_are_a_graph_only_where_they_leave_an_sm_alone(
    m: int, is_graph: bool, group: dist.ProcessGroup
):
    """Of the 132 that the machine has: 22 programs here, 171 there."""
    call = call_of(Case(REDUCE, "one_shot_packed"), group, SIZES._replace(m=m * PACKED_SHARE))
    before = Graph.replayed
    for _ in range(MOST_WARM):
        call()
    assert (Graph.replayed > before) == is_graph


def test_what_is_entered_is_counted(group: dist.ProcessGroup):
    names = {name.split(":")[1] for name in counted(call_of(PUSH, group, SIZES)).python}
    assert {"all_gather_matmul", "look_up", "Board.post", "PlanRun.__call__"} <= names


def test_a_known_call_is_still_announced_and_a_wrong_one_refused(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
):
    call = call_of(PUSH, group, SIZES)
    call()
    posted: list[bytes] = []
    monkeypatch.setattr(Board, "post", lambda self, signature: posted.append(signature))
    call()
    assert [each.startswith(b"m=512") for each in posted] == [True]
    assert isinstance(call, partial)
    x, w, *_ = call.args
    for wrong in ({"m": 512.0}, {"return_gathered": 0}, {"plan": ["push"]}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            call.func(x, w, group, **wrong)
    assert len(posted) == 1
