"""Groups of a part of a group's ranks, for the collectives of plans that span no more."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from overweave.ir.schedule import Collective, Operation
from overweave.memory.group import Group, resolve

Ranks = tuple[int, ...]
_MADE: WeakKeyDictionary[dist.ProcessGroup, dict[Ranks, Group]] = WeakKeyDictionary()


def part_of(group: Group, ranks: Ranks) -> Group:
    """The group of these ranks of a group, given in ascending order, of which this rank is one.

    The first call makes it: collective among these ranks. It is kept as long as the group.
    """
    if len(ranks) == group.world_size:
        return group
    made = _MADE.setdefault(group.process_group, {})
    if ranks not in made:
        members = dist.get_process_group_ranks(group.process_group)
        part = dist.new_group(
            [members[rank] for rank in ranks],
            timeout=timedelta(seconds=group.timeout_s),
            use_local_synchronization=True,
        )
        made[ranks] = resolve(part)
    return made[ranks]


def make_parts(group: Group, operations: Iterable[Operation]) -> None:
    """Makes the groups that a rank's collectives need, all ranks in one order: so that none waits for another in turn.

    operations: of this rank.
    """
    for ranks in sorted({one.ranks for one in operations if isinstance(one, Collective)}):
        part_of(group, ranks)
