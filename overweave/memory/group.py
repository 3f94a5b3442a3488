"""The group of ranks an operator runs in, its subgroups, and how its ranks exchange a few bytes.

Bytes travel as fixed-width uint8 tensors. Object collectives unpickle what a peer sends, so nothing here uses them.
"""

from __future__ import annotations

import atexit
import inspect
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from overweave.compat.torch_names import disable_current_modes, get_process_group_store, resolve_process_group, world
from overweave.errors import GroupError, PeerDied, PeerError, PeerTimeout
from overweave.ir.schedule import Collective, Operation

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """A process group as one of its ranks sees it. `rank` and `world_size` count within the group.

    device: where byte collectives of this group run: the CPU if the group has a CPU backend, else the current GPU.
    lock: held by the thread of this process that runs a call; other threads wait for it.
    """

    name: str
    rank: int
    world_size: int
    process_group: ProcessGroup
    device: torch.device
    lock: AbstractContextManager[object] = field(default_factory=threading.RLock, compare=False, repr=False)

    @property
    def timeout_s(self) -> float:
        """The group's own timeout: the default deadline of every wait."""
        backend = self.process_group._get_backend(self.device)
        timeout: timedelta = backend.options._timeout
        return timeout.total_seconds()


class OfGroup(WeakKeyDictionary[ProcessGroup, T]):
    """What is kept for each process group as long as that lives: it must not outlive the interpreter."""

    def __init__(self) -> None:
        super().__init__()
        atexit.register(self.clear)


GroupLike = ProcessGroup | DeviceMesh | str | None
# Newer torch annotates a name by a type that older torch does not have; at run time both are str.
_by_name: Callable[[Any], ProcessGroup] = resolve_process_group
LIVE_GROUPS: Collection[ProcessGroup] = world.pg_map  # that were not destroyed


def resolve(group: GroupLike) -> Group:
    """Return the Group that `group` names; None is the world. Raises GroupError."""
    process_group = process_group_of(group)
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise _not_a_member(process_group.group_name)
    device = _byte_device(process_group)
    if getattr(process_group._get_backend(device), "options", None) is None:
        found = f"its backend {dist.get_backend(process_group)} has no time-out: it moves nothing, or is not known here"
        raise GroupError(f"compute in the group {process_group.group_name}", found, "Use gloo on CPUs, NCCL on GPUs")
    return Group(
        name=process_group.group_name,
        rank=rank,
        world_size=dist.get_world_size(process_group),
        process_group=process_group,
        device=device,
    )


def all_gather_bytes(group: Group, data: bytes, width: int, deadline_s: float | None = None) -> list[bytes]:
    """All-gather `data`, at most `width` bytes, in rank order. Waits for all ranks.

    Raises PeerDied or PeerTimeout; after either the process group cannot run more collectives.
    """
    if len(data) > width:
        raise GroupError(f"exchange {width} bytes", f"got {len(data)}", "Shorten the message")
    message = len(data).to_bytes(4, "little") + data.ljust(width, b"\0")
    deadline = timedelta(seconds=group.timeout_s if deadline_s is None else deadline_s)
    with disable_current_modes():  # a mode of the caller's, such as FakeTensorMode, must not apply to these tensors
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(group.device)
        gathered = [torch.empty_like(mine) for _ in range(group.world_size)]
        try:
            work = dist.all_gather(gathered, mine, group=group.process_group, async_op=True)
            if work is not None:
                work.wait(deadline)
            received = [bytes(tensor.tolist()) for tensor in gathered]
        except RuntimeError as error:
            raise collective_failure(group, error) from error
    return [record[4 : 4 + int.from_bytes(record[:4], "little")] for record in received]


def collective_failure(group: Group, error: RuntimeError) -> PeerError:
    """Return the typed error for what gloo or NCCL raised: a broken connection is a peer that died."""
    text = str(error)
    backend = dist.get_backend(group.process_group)
    asked = f"meet the other ranks of group {group.name}, on rank {group.rank} of {group.world_size}"
    if "timed out" in text.lower() or "timeout" in text.lower():
        found = f"a rank did not come in time ({backend}: {text[:240]})"
        return PeerTimeout(asked, found, "Make the same call on every rank of the group; find the rank that is stuck")
    found = f"the connection to a rank broke ({backend}: {text[:240]})"
    return PeerDied(asked, found, "Find out why that rank's process ended; start the group anew")


def process_group_of(group: GroupLike) -> ProcessGroup:
    """Return the ProcessGroup that `group` names; None is the world. Raises GroupError."""
    if not (dist.is_available() and dist.is_initialized()):
        found = "torch.distributed is not initialised"
        raise GroupError("find the process group", found, "Call init_process_group first")
    if isinstance(group, str):
        try:
            return _by_name(group)
        except (RuntimeError, ValueError, KeyError) as error:
            asked = f"find process group {group[:80]!r}"
            raise GroupError(asked, "no group has this name", "Pass its group_name") from error
    if isinstance(group, DeviceMesh):
        group = _group_of_mesh(group)
    if group is None:
        group = dist.group.WORLD
    value: object = group
    # new_group returns NON_GROUP_MEMBER to ranks outside of the new group.
    if isinstance(value, int) and value == dist.GroupMember.NON_GROUP_MEMBER:
        raise _not_a_member("that was passed")
    if not isinstance(group, ProcessGroup):
        found, cure = f"got {type(group).__name__}", "Pass one of these; a bias and its like go by their names"
        raise GroupError("group: a ProcessGroup, its name, a 1-D DeviceMesh or None", found, cure)
    if group not in LIVE_GROUPS:
        raise GroupError("compute in the group that was passed", "it was destroyed", "Make a new one")
    return group


def _group_of_mesh(mesh: DeviceMesh) -> ProcessGroup:
    """Return the process group of a 1-D mesh, from a cache by the mesh's identity: `mesh.get_group()` is slow."""
    number = id(mesh)
    known = _OF_MESHES.get(number)
    if known is not None and known[0]() is mesh:
        group = known[1]()
        if group is not None and group in LIVE_GROUPS:
            return group
    group = _checked_group_of_mesh(mesh)
    _OF_MESHES[number] = weakref.ref(mesh, lambda gone: _OF_MESHES.pop(number, None)), weakref.ref(group)
    return group


# id of a mesh -> the mesh and its process group
_OF_MESHES: dict[int, tuple[weakref.ref[DeviceMesh], weakref.ref[ProcessGroup]]] = {}


def _checked_group_of_mesh(mesh: DeviceMesh) -> ProcessGroup:
    """Return `mesh.get_group()`. Raise GroupError unless the mesh is 1-D, its ranks ascend and its group exists."""
    if mesh.ndim != 1:
        found = f"it has {mesh.ndim} dimensions {mesh.mesh_dim_names or ''}".rstrip()
        raise GroupError("use a 1-D DeviceMesh", found, "Pass one dimension: mesh['name']")
    if mesh.get_coordinate() is None:
        raise _not_a_member("of the DeviceMesh")
    try:
        group = mesh.get_group()
        members = dist.get_process_group_ranks(group)
    except (RuntimeError, ValueError, KeyError) as error:
        raise GroupError("use the group of a DeviceMesh", "it was destroyed", "Make a new mesh") from error
    ranks = mesh.mesh.tolist()
    if ranks != members:  # torch sorts the ranks of a group, and not those of a mesh
        found = f"its ranks are {ranks}"[:80] + ", and its process group has them in another order"
        raise GroupError("rows in the order of a DeviceMesh", found, "Make a mesh whose ranks ascend")
    return group


def _not_a_member(name: str) -> GroupError:
    found = f"rank {dist.get_rank()} of the world is not in it"
    return GroupError(f"compute in the group {name}", found, "Call only on the group's own ranks")


def _byte_device(process_group: ProcessGroup) -> torch.device:
    """Return the CPU if the group has a CPU backend, else the group's GPU."""
    cpu = torch.device("cpu")
    if cpu in process_group._device_types:
        return cpu
    # In a new thread torch's current GPU is 0, whichever the process has set: prefer the group's own.
    return process_group.bound_device_id or torch.device("cuda", torch.cuda.current_device())


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
        _know_as_many_groups(group, *key)
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


def _know_as_many_groups(group: Group, ranks: Ranks, most_sms: int) -> None:
    """Make the ranks that are about to create a group know as many groups: torch names one that its own ranks alone
    create after them, and after how many each of them knows. A rank that knows fewer creates some of its own.
    """
    store, own = get_process_group_store(group.process_group), len(world.pg_names)
    key = f"overweave groups known before {ranks} of {most_sms}"
    store.set(f"{key}, rank {group.rank}", str(own))
    most = max(int(store.get(f"{key}, rank {rank}")) for rank in ranks)
    for _ in range(most - own):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


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
