"""Groups whose ranks do not ascend in the world: rows go to the ranks of the group, in parts of it, too."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import overweave as ow
from campaigns.cases import BY_COLLECTIVES, EXCHANGED, PLAIN
from overweave.errors import GroupError
from overweave.memory import group as groups
from overweave.memory.group import resolve, subgroup
from tests.ops.calls import is_right, small_call
from tests.ranks import run_ranks

ORDERS = ([3, 2, 1, 0], [2, 0, 3, 1])
needs_order = pytest.mark.skipif(not groups.CAN_KEEP_ORDER, reason="this torch sorts the ranks of new groups")
SPLITS = hasattr(dist.ProcessGroupGloo, "split")
MADE_BY = (
    "new_group",
    pytest.param("split_group", marks=pytest.mark.skipif(not SPLITS, reason="gloo does not split in this torch")),
)


def disordered(order: list[int], made_by: str = "new_group") -> dist.ProcessGroup:
    """A group of all ranks in another order. made_by: the function of torch that makes it."""
    group = dist.split_group(None, [order]) if made_by == "split_group" else dist.new_group(order, sort_ranks=False)
    assert dist.get_rank(group) == order.index(dist.get_rank())
    assert isinstance(group, dist.ProcessGroup)
    return group


def gather_in_parts(order: list[int], made_by: str) -> list[list[int]]:
    """Which ranks of the group a gather among each part of it finds, in the order of its rows.

    Every rank has as many parts: torch's name of a group that its own ranks alone make counts those that are there.
    """
    group, found = resolve(disordered(order, made_by)), []
    for ranks in ((0, 1), (2, 3), (0, 3), (1, 2), (0, 1, 2, 3)):
        if group.rank in ranks:
            part = subgroup(group, ranks)
            rows = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
            dist.all_gather(rows, torch.tensor([group.rank]), group=part.process_group)
            assert [int(row) for row in rows] == list(ranks)
            found.append(list(ranks))
    return found


@needs_order
@pytest.mark.parametrize("made_by", MADE_BY)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_parts_have_the_order_of_the_group(order: list[int], made_by: str):
    assert [len(parts) for parts in run_ranks(gather_in_parts, 4, order, made_by)] == [3] * 4


def exchanged(operator: str, plan: str, group: dist.ProcessGroup) -> bool:
    """Whether each rank gets, from each, the block that was for it."""
    own, ranks = dist.get_rank(group), range(4)
    whole = torch.arange(4 * 4 * 2 * 8.0).reshape(4, 4 * 2, 8) % 7  # of each rank, two rows for each
    w = torch.eye(8)
    call = getattr(ow, operator)
    expected = torch.cat([whole[source, 2 * own : 2 * own + 2] for source in ranks])
    return torch.equal(call(whole[own], w, group, plan=plan), expected)


def wrong_calls(order: list[int], made_by: str) -> list[str]:
    group, wrong = disordered(order, made_by), []
    for one in (*PLAIN, *BY_COLLECTIVES):
        if not is_right(small_call(one.operator, 64, plan=one.plan, n=32), 0, group):
            wrong.append(str(one))
    return wrong + [str(one) for one in EXCHANGED if not exchanged(one.operator, one.plan, group)]


@needs_order
@pytest.mark.slow
@pytest.mark.parametrize("made_by", MADE_BY)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_operators_are_exact(order: list[int], made_by: str):
    assert run_ranks(wrong_calls, 4, order, made_by) == [[]] * 4


def refusals() -> list[str]:
    """As with a torch that sorts: refused on all ranks, those of a part that ascends, too."""
    group, told = resolve(disordered([0, 1, 3, 2])), []
    with patch.object(groups, "CAN_KEEP_ORDER", False):
        own = (0, 1) if group.rank < 2 else (2, 3)
        with pytest.raises(GroupError) as caught:
            subgroup(group, own)
        told.append(str(caught.value))
        assert subgroup(group, (0, 1, 2, 3)) is group
    return told


@needs_order
def test_they_are_refused_where_torch_sorts():
    for told in run_ranks(refusals, 4):
        assert "its ranks are [0, 1, 3, 2] of the world" in told[0]


def parts_of_ranks_that_know_unlike_numbers() -> list[int]:
    """The ranks that a part finds, where one rank of it has made more groups than the other."""
    group = resolve(None)
    for _ in range(2 if group.rank == 0 else 0):
        dist.new_group([0], use_local_synchronization=True)
    found = []
    for ranks in ((0, 1), (1, 2), (0, 2)):
        if group.rank in ranks:
            sent = torch.ones(1, dtype=torch.int64)
            dist.all_reduce(sent, group=subgroup(group, ranks).process_group)
            found.append(int(sent))
    return found


def test_parts_are_made_whatever_number_of_groups_each_rank_knows():
    assert run_ranks(parts_of_ranks_that_know_unlike_numbers, 3, timeout_s=20) == [[2, 2]] * 3
