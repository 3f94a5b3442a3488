"""The group of ranks an operator runs in, and how its ranks exchange a few bytes.

Bytes travel as fixed-width uint8 tensors. Object collectives unpickle what a peer sends, so nothing here uses them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from overweave.compat.torch_names import disable_current_modes, resolve_process_group, world
from overweave.errors import GroupError, PeerDied, PeerError, PeerTimeout


@dataclass(frozen=True)
class Group:
    """A process group as one of its ranks sees it. `rank` and `world_size` count within the group.

    device: where byte collectives of this group run: the CPU where the group has a CPU backend, else the current GPU.
    turn: held by the one thread of this process that calls; others wait for it.
    """

    name: str
    rank: int
    world_size: int
    process_group: ProcessGroup
    device: torch.device
    turn: AbstractContextManager[object] = field(default_factory=threading.RLock, compare=False, repr=False)

    @property
    def timeout_s(self) -> float:
        """The group's own timeout: the default deadline of every wait."""
        backend = self.process_group._get_backend(self.device)
        timeout: timedelta = backend.options._timeout
        return timeout.total_seconds()


GroupLike = ProcessGroup | DeviceMesh | str | None
# To newer torch a name is of a type that older torch does not have; to Python both are text.
_by_name: Callable[[Any], ProcessGroup] = resolve_process_group
LIVING: Collection[ProcessGroup] = world.pg_map  # those that were not destroyed


def resolve(group: GroupLike) -> Group:
    """What the caller means by `group`; None is the world. Raises GroupError."""
    process_group = process_group_of(group)
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise _lacks_this_rank(process_group.group_name)
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
    """`data`, at most `width` bytes, of every rank in rank order. Waits for all ranks.

    Raises PeerDied or PeerTimeout; after either the process group is not fit for more collectives.
    """
    if len(data) > width:
        raise GroupError(f"exchange {width} bytes", f"got {len(data)}", "Shorten the message")
    message = len(data).to_bytes(4, "little") + data.ljust(width, b"\0")
    deadline = timedelta(seconds=group.timeout_s if deadline_s is None else deadline_s)
    with disable_current_modes():  # one of the caller's makes his tensors fake, say: not these
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(group.device)
        everyones = [torch.empty_like(mine) for _ in range(group.world_size)]
        try:
            work = dist.all_gather(everyones, mine, group=group.process_group, async_op=True)
            if work is not None:
                work.wait(deadline)
            received = [bytes(tensor.tolist()) for tensor in everyones]
        except RuntimeError as error:
            raise collective_failure(group, error) from error
    return [record[4 : 4 + int.from_bytes(record[:4], "little")] for record in received]


def collective_failure(group: Group, error: RuntimeError) -> PeerError:
    """The typed error for what a collective library raised: a connection that broke is a peer that died."""
    text = str(error)
    backend = dist.get_backend(group.process_group)
    asked = f"meet the other ranks of group {group.name}, on rank {group.rank} of {group.world_size}"
    if "timed out" in text.lower() or "timeout" in text.lower():
        found = f"a rank did not come in time ({backend}: {text[:240]})"
        return PeerTimeout(asked, found, "Make the same call on every rank of the group; find the rank that is stuck")
    found = f"the connection to a rank broke ({backend}: {text[:240]})"
    return PeerDied(asked, found, "Find out why that rank's process ended; start the group anew")


def process_group_of(group: GroupLike) -> ProcessGroup:
    """The process group that a caller means; None is the world. Raises GroupError."""
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
    given: object = group
    if isinstance(given, int) and given == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group returns to outsiders
        raise _lacks_this_rank("that was passed")
    if not isinstance(group, ProcessGroup):
        found, cure = f"got {type(group).__name__}", "Pass one of these; a bias and its like go by their names"
        raise GroupError("group: a ProcessGroup, its name, a 1-D DeviceMesh or None", found, cure)
    if group not in LIVING:
        raise GroupError("compute in the group that was passed", "it was destroyed", "Make a new one")
    return group


def _group_of_mesh(mesh: DeviceMesh) -> ProcessGroup:
    """Remembered, as long as both live: a mesh takes its time to answer. Another one, be it equal, has groups of
    its own."""
    number = id(mesh)
    known = _OF_MESHES.get(number)
    if known is not None and known[0]() is mesh:
        group = known[1]()
        if group is not None and group in LIVING:
            return group
    group = _asked_of_mesh(mesh)
    _OF_MESHES[number] = weakref.ref(mesh, lambda gone: _OF_MESHES.pop(number, None)), weakref.ref(group)
    return group


_OF_MESHES: dict[int, tuple[weakref.ref[DeviceMesh], weakref.ref[ProcessGroup]]] = {}


def _asked_of_mesh(mesh: DeviceMesh) -> ProcessGroup:
    if mesh.ndim != 1:
        found = f"it has {mesh.ndim} dimensions {mesh.mesh_dim_names or ''}".rstrip()
        raise GroupError("use a 1-D DeviceMesh", found, "Pass one dimension: mesh['name']")
    if mesh.get_coordinate() is None:
        raise _lacks_this_rank("of the DeviceMesh")
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


def _lacks_this_rank(name: str) -> GroupError:
    found = f"rank {dist.get_rank()} of the world is not in it"
    return GroupError(f"compute in the group {name}", found, "Call only on the group's own ranks")


def _byte_device(process_group: ProcessGroup) -> torch.device:
    cpu = torch.device("cpu")
    if cpu in process_group._device_types:
        return cpu
    # The group's own, where it has one: a new thread's current GPU is the first, whichever its process chose.
    return process_group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
