"""The target of a plan: device, GPU and links, and the options of plans there."""

from __future__ import annotations

import re
from functools import lru_cache, partial
from pathlib import Path

import torch
from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.hardware.cards import (
    H200,
    MOST_OF_ONE_HOST,
    Gpu,
    MachineMatch,
    file_digest,
    find,
    hosts_like,
    machine_for,
    machine_named,
)
from overweave.hardware.machine import Machine, PeerAccess, decode, load, names
from overweave.hardware.multicast import nccl_uses_it
from overweave.ir.problem import Problem
from overweave.memory.board.board import Board
from overweave.memory.board.islands import Islands
from overweave.memory.cuda.card import gpu_of, has_multicast
from overweave.memory.cuda.heap import group_has_peer_access, has_peer_access, islands_have_peer_access
from overweave.memory.group import Group, OfGroup
from overweave.process_settings import current
from overweave.schedules.records.record import Method
from overweave.tuner.caches import cache_folders, read_cached_if_readable, save_file

# `overweave calibrate` writes its file to the user's cache, named after the GPU and its links.

LARGEST_BYTES = 1 << 20
_AGREED = OfGroup[dict[Gpu, MachineMatch]]()


def calibrated_path(gpu: Gpu) -> Path:
    """Return the path of a GPU's calibrated file: readable, and different for another card or other links."""
    words = f"{gpu.name} {gpu.sms} {round(gpu.memory_gib)} {gpu.joined}"
    return (
        cache_folders()["overweave"] / "machines" / f"{re.sub('[^a-z0-9]+', '-', words.lower()).strip('-')[:96]}.json"
    )


def save_calibrated(gpu: Gpu, data: bytes) -> Path:
    """Save a machine file for later calls. Warns if it cannot be written."""
    path = calibrated_path(gpu)
    save_file(path, lambda: data)
    return path


def machine_of(gpu: Gpu) -> MachineMatch:
    """Return the machine of a GPU. Warns of a calibrated file that is ignored."""
    path = calibrated_path(gpu)
    found = read_cached_if_readable(path, partial(_decode_calibrated, path, gpu), LARGEST_BYTES)
    return found or find(gpu)


def agreed_machine(group: Group, gpu: Gpu) -> MachineMatch:
    """Return the machine that all ranks of a group use: the calibrated file if all have the same one; else a described
    one.

    The first call is collective; later ones return the same. Ranks on unlike GPUs use the machine of the first name, as
    `nearest`. Raises PeerError.
    """
    agreed = _AGREED.setdefault(group.process_group, {})
    if gpu not in agreed:
        agreed[gpu] = machine_of(gpu) if group.world_size == 1 else _agreed(Board.of(group), gpu)
    return agreed[gpu]


def _agreed(board: Board, gpu: Gpu) -> MachineMatch:
    """Return the machine that the ranks agree on by comparing digests. Collective."""
    own, described = machine_of(gpu), find(gpu)
    files = {*board.all_gather_bytes(own.digest.encode())}
    machines = sorted({*board.all_gather_bytes(described.machine.encode())})
    if len(machines) > 1:
        return MachineMatch(machines[0].decode(), "nearest", gpu)
    return own if len(files) == 1 else described


def _decode_calibrated(path: Path, gpu: Gpu, data: bytes) -> MachineMatch:
    """Return the machine of a calibrated file. Raises InputError if it is not a machine, or of another GPU."""
    machine = decode(data, path.name)
    if machine.processor.sms != gpu.sms:
        raise InputError("calibrated machine", f"it has {machine.processor.sms} SMs, the GPU {gpu.sms}", "")
    return MachineMatch(str(path), "calibrated", gpu, file_digest(data))


class Target(Struct, frozen=True):
    """The device that a plan runs on.

    is_hopper: sm_90. name: the GPU's, as its driver reports it; ignored on a CPU. peer_access: as of a Machine, between
    all ranks; island_access: inside each island. islands: the ranks of each, where there are several; parted: the same
    as text. found: the described machine that predictions are made on. has_multicast: NVLink multicast, which NCCL uses
    unless it is switched off.
    """

    kind: str
    sms: int = 132
    is_hopper: bool = True
    name: str = "NVIDIA H200"
    peer_access: bool = True
    found: MachineMatch = H200
    has_multicast: bool = False
    parted: str = ""
    island_access: bool = True
    islands: tuple[tuple[int, ...], ...] = ()

    def machine(self, world_size: int) -> Machine | None:
        """Return the description for predictions of `world_size` ranks; None for a CPU, for more ranks than it can
        have, and for ranks on several islands whose network is not described."""
        machine = machine_for(self.found, world_size, self.islands) if self.kind == "cuda" else None
        if machine is None or self.parted or machine.peer_access == self.peer_access:
            return machine
        return replace(machine, peers=PeerAccess(self.peer_access, "the GPUs at hand"))

    @property
    def machine_text(self) -> str:
        """Return the described machine, and which one its hosts are joined as, if that is another."""
        one = load(self.found.machine)
        hosts = hosts_like(one) if self.parted else None
        if hosts is None or hosts.name == one.name:
            return str(self.found)
        return f"{self.found}; its hosts are joined as those of {hosts.name}, a guess"

    @property
    def has_tuned_kernels(self) -> bool:
        """Whether rates of our tile kernels are known on it."""
        machine = machine_for(self.found, 1) if self.kind == "cuda" else None
        return machine is None or any(tile.kernel == self.kernel for tile in machine.tiles)

    @property
    def has_far_pairs(self) -> bool:
        """Whether some pairs of its GPUs are joined by slower links than others: rows may be forwarded by other
        ranks."""
        return self.kind == "cuda" and _has_far_pairs(self.found)

    @property
    def links(self) -> str:
        """Return the described machine whose links its GPUs have, if these are more than those to one switch; else
        nothing."""
        is_described = self.kind == "cuda" and not self.parted and self.found.machine in names()
        return self.found.machine if is_described and load(self.found.machine).topology.kind != "switch" else ""

    @property
    def kernel(self) -> str:
        """Return which of our tile kernels it runs."""
        return "hopper" if self.is_hopper else "portable"

    def device(self, world_size: int) -> str:
        """Return the key of measurements. With NVLink multicast in use by NCCL it is another one, and on several
        islands."""
        is_gpu = self.kind == "cuda"
        name = self.name if is_gpu else self.kind
        if self.parted:
            return f"{name}, several islands"
        return f"{name}, NVLink multicast" if is_gpu and self.has_multicast and nccl_uses_it(world_size) else name


@lru_cache
def _has_far_pairs(found: MachineMatch) -> bool:
    machine = machine_for(found, 1)
    return machine is not None and not machine.routes.are_alike(machine.gpus)


def target_of(device: torch.device, group: Group | None = None) -> Target:
    """Return the target of a device. With a group, what its ranks agree on: the first call of a group is collective,
    and raises RankMismatch and PeerError."""
    islands = None if group is None or group.world_size == 1 else Board.of(group).islands
    several = islands.members if islands is not None and not islands.is_one else ()
    parted = "" if islands is None else islands.parted
    if device.type == "cpu":
        return Target("cpu", peer_access=not parted, parted=parted, islands=several)
    gpu = gpu_of(device)
    reaches = has_peer_access(device) if group is None else group_has_peer_access(group, device)
    found = machine_of(gpu) if group is None else agreed_machine(group, gpu)
    inside = reaches if group is None or not parted else islands_have_peer_access(group, device)
    hopper, multicast = gpu.capability[0] == 9, has_multicast(device)
    return with_margin(Target("cuda", gpu.sms, hopper, gpu.name, reaches, found, multicast, parted, inside, several))


def under_settings(problem: Problem) -> Problem:
    """Return a problem as `ow.settings` asks for it."""
    return replace(problem, batch_invariant=True) if current().batch_invariant and problem.m else problem


def with_margin(target: Target) -> Target:
    """Return the target less the SMs that `ow.settings(sm_margin=)` leaves free. Raises InputError if none are left."""
    margin = current().sm_margin
    if target.kind == "cpu" or not margin:
        return target
    if margin >= target.sms:
        cure = f"Set at most {target.sms - 1}: ow.settings(sm_margin=)"
        raise InputError(f"leave {margin} SMs free", f"{target.name} has {target.sms}", cure)
    return replace(target, sms=target.sms - margin)


def target_on(machine: Machine, found: MachineMatch | None = None, world_size: int = 1) -> Target:
    """Return a GPU of a described machine as target, of a group of its first ranks. found: its name, if it is not one
    of the package's."""
    is_hopper = any(tile.kernel == "hopper" for tile in machine.tiles)
    name = machine.card.names[0] if machine.card else machine.title
    found = found or MachineMatch(machine.name, machine.basis)
    islands = on_paper(machine, world_size)
    several = () if islands.is_one else islands.members
    reaches = machine.peer_access and not several
    target = Target("cuda", machine.processor.sms, is_hopper, name, reaches, found)
    return with_margin(replace(target, parted=islands.parted, island_access=machine.peer_access, islands=several))


def over_hosts(target: Target, world_size: int) -> Target:
    """Return a GPU as target of a group on as many hosts like those of its machine as the ranks need; unchanged if one
    is enough, or if none are described."""
    if target.kind != "cuda" or target.parted or machine_for(target.found, world_size) is not None:
        return target
    firsts = range(0, world_size, MOST_OF_ONE_HOST)
    members = tuple(tuple(range(at, min(at + MOST_OF_ONE_HOST, world_size))) for at in firsts)
    described = machine_for(target.found, world_size, members)
    if described is None:
        return target
    islands = on_paper(described, world_size)
    return replace(target, peer_access=False, parted=islands.parted, islands=islands.members)


def on_paper(machine: Machine, world_size: int) -> Islands:
    """Return the islands of the first ranks of a described machine."""
    members = tuple(tuple(gpu for gpu in island if gpu < world_size) for island in machine.islands)
    there = tuple(filter(None, members))
    host_of = {gpu: f"host {at}" for at, island in enumerate(there) for gpu in island}
    return Islands(there, tuple(host_of[gpu] for gpu in range(world_size)))


def target_named(machine: str, world_size: int = 1) -> Target:
    """Return a GPU of a machine, by name or file, as target. Raises InputError if it has no GPUs for so many ranks, and
    MachineFileError."""
    found = machine_named(machine)
    described = machine_for(found, world_size)
    if described is None:
        asked = f"{world_size} ranks on {machine[:200]}"
        raise InputError(asked, f"it has {load(machine).gpus} GPUs", "Ask for fewer ranks, or another machine")
    return target_on(described, found, world_size)


def tile_options(target: Target, method: Method) -> dict[str, str | int]:
    """Return the options of every plan of a method with a tile kernel on a target."""
    if target.kind == "cpu":
        return {}
    own: dict[str, str | int] = {"pieces": 1} if method.takes("pieces") else {}
    if target.links and method.takes("links"):
        own["links"] = target.links
    return {"kernel": target.kernel, "sms": target.sms, **own}
