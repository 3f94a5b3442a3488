"""Groups of a part of a group's ranks, for the collectives of plans that span no more."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from overweave.errors import GroupError
from overweave.ir.schedule import Collective, Operation
from overweave.memory.group import Group, resolve

Ranks = tuple[int, ...]
_MADE: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Ranks, int], Group]] = WeakKeyDictionary()
NCCL = "nccl"
KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters  # older torch sorts the ranks of every group


def part_of(group: Group, ranks: Ranks, most_sms: int = 0) -> Group:
    """The group of these ranks of a group, given in ascending order, of which this rank is one.

    most_sms: that kernels of its collectives may take, one block each, where NCCL runs them; 0: as many as it likes.
    Its ranks have the order that they have in the group. The first call makes it: collective among these ranks. It is
    kept as long as the group. Raises GroupError where ranks of the group do not ascend in the world, on all of them,
    and torch sorts those of every group that it makes.
    """
    is_limited = most_sms > 0 and NCCL in dist.get_backend_config(group.process_group)
    if len(ranks) == group.world_size and not is_limited:
        return group
    made, key = _MADE.setdefault(group.process_group, {}), (ranks, most_sms if is_limited else 0)
    if key not in made:
        members = _members(group)
        order: dict[str, Any] = {"sort_ranks": False} if KEEPS_ORDER else {}
        part = dist.new_group(
            [members[rank] for rank in ranks],
            timeout=timedelta(seconds=group.timeout_s),
            backend=NCCL if is_limited else None,
            pg_options=_at_most(most_sms) if is_limited else None,
            use_local_synchronization=True,
            **order,
        )
        made[key] = resolve(part)
    return made[key]


def _members(group: Group) -> list[int]:
    """The ranks of a group, by their numbers in the world. Raises GroupError where no part can have their order."""
    found = [dist.get_global_rank(group.process_group, rank) for rank in range(group.world_size)]
    if found != sorted(found) and not KEEPS_ORDER:
        told = f"its ranks are {found} of the world, and this torch sorts the ranks of new groups"
        cure = "Name a plan without parts of the group, or make the group of ranks that ascend"
        raise GroupError(f"make groups of a part of {group.name}", told, cure)
    return found


def _at_most(sms: int) -> Any:
    """How NCCL is asked for a communicator whose kernels have so many blocks at most, each by itself.

    By itself NCCL launches clusters of four blocks on Hopper, which need four free SMs of one GPC.
    MEASURED: of three reduce-scatters beside tiles one took 983 us, with clusters 1,031; others the same within
    1 % (two H100s, benchmarks/results/waves.* and waves_in_clusters.*, 2026-11-26).
    """
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas, options.config.cga_cluster_size = sms, 0
    return options


def make_parts(
    group: Group, operations: Iterable[Operation], most_sms: Callable[[Operation], int] | None = None
) -> None:
    """Makes the groups that a rank's collectives need, all ranks in one order: so that none waits for another in turn.

    operations: of this rank. most_sms: that each may take.
    """
    own = (one for one in operations if isinstance(one, Collective))
    for ranks, sms in sorted({(one.ranks, most_sms(one) if most_sms else 0) for one in own}):
        part_of(group, ranks, sms)
