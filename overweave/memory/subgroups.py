"""Subgroups of a group's ranks, for collectives of plans that span fewer ranks."""

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
# group -> (ranks, most_sms) -> subgroup
_SUBGROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Ranks, int], Group]] = WeakKeyDictionary()
NCCL = "nccl"
CAN_KEEP_ORDER = (
    "sort_ranks" in inspect.signature(dist.new_group).parameters
)  # older torch sorts the ranks of every group


def subgroup(group: Group, ranks: Ranks, most_sms: int = 0) -> Group:
    """Return the subgroup of these ranks, in ascending order; this rank is one of them.

    most_sms: SMs that a kernel of its collectives may take where NCCL runs them; 0: no limit. The first call creates
    it, collectively among these ranks; it lives as long as the group. Raises GroupError on all ranks if the group's
    ranks do not ascend in the world and this torch sorts the ranks of new groups.
    """
    is_limited = most_sms > 0 and NCCL in dist.get_backend_config(group.process_group)
    if len(ranks) == group.world_size and not is_limited:
        return group
    subgroups, key = _SUBGROUPS.setdefault(group.process_group, {}), (ranks, most_sms if is_limited else 0)
    if key not in subgroups:
        members = _global_ranks(group)
        order: dict[str, Any] = {"sort_ranks": False} if CAN_KEEP_ORDER else {}
        process_group = dist.new_group(
            [members[rank] for rank in ranks],
            timeout=timedelta(seconds=group.timeout_s),
            backend=NCCL if is_limited else None,
            pg_options=_nccl_options(most_sms) if is_limited else None,
            use_local_synchronization=True,
            **order,
        )
        subgroups[key] = resolve(process_group)
    return subgroups[key]


def _global_ranks(group: Group) -> list[int]:
    """Return the world ranks of a group. Raises GroupError if a subgroup could not keep their order."""
    ranks = [dist.get_global_rank(group.process_group, rank) for rank in range(group.world_size)]
    if ranks != sorted(ranks) and not CAN_KEEP_ORDER:
        found = f"its ranks are {ranks} of the world, and this torch sorts the ranks of new groups"
        cure = "Name a plan without parts of the group, or make the group of ranks that ascend"
        raise GroupError(f"make groups of a part of {group.name}", found, cure)
    return ranks


def _nccl_options(sms: int) -> Any:
    """Return options of an NCCL communicator whose kernels have at most so many blocks, and no clusters.

    By default NCCL launches clusters of four blocks on Hopper, which need four free SMs of one GPC.
    MEASURED: of three reduce-scatters beside tiles one took 983 us, with clusters 1,031; others the same within
    1 % (two H100s, benchmarks/results/waves.* and waves_in_clusters.*, 2026-11-26).
    """
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas, options.config.cga_cluster_size = sms, 0
    return options


def create_subgroups(
    group: Group, operations: Iterable[Operation], most_sms: Callable[[Operation], int] | None = None
) -> None:
    """Create the subgroups of a rank's collectives, in one order on all ranks: creation is collective.

    operations: of this rank. most_sms: SMs that the kernel of each may take.
    """
    own = (one for one in operations if isinstance(one, Collective))
    for ranks, sms in sorted({(one.ranks, most_sms(one) if most_sms else 0) for one in own}):
        subgroup(group, ranks, sms)
