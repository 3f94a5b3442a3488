"""Islands: the ranks of a group that can map each other's memory, found by trying when the group's board is made.

Ranks of one host, of one user and in one container are an island. Between islands the library alone moves rows.
OVERWEAVE_ISLAND, a name in the environment of each rank, parts ranks that could: for tests, and for odd machines.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec

from overweave.compat.versions import installed
from overweave.errors import GroupError, MachineError
from overweave.ir.exchange import NO_REACH
from overweave.memory.board.records import AllGatherBytes, OutOfReach, SharedFile, island_name

BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all processes of a host, and of no other
TOLD_BYTES = 40  # of each name that ranks tell each other, so that all fit into one message of the board
MOST_NAMED = 4  # islands, in reasons
SOFTWARE = ("overweave", "triton")
SAME_SOFTWARE = "Install the same versions on all hosts"


class Islands(NamedTuple):
    """The islands of a group. members: the ranks of each, ascending; islands in the order of their first ranks. hosts:
    of each rank the name of its host, or of its island where the environment names one.
    """

    members: tuple[tuple[int, ...], ...]
    hosts: tuple[str, ...]

    @property
    def is_one(self) -> bool:
        """Whether every rank maps the memory of all others."""
        return len(self.members) == 1

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's island, itself among them."""
        return next(island for island in self.members if rank in island)

    @property
    def parted(self) -> str:
        """Which ranks lie where, of many islands the first ones; empty where that parts nobody."""
        if self.is_one or len(self.members) <= MOST_NAMED:
            return "" if self.is_one else str(self)
        return f"{', '.join(self._named()[:MOST_NAMED])} and {len(self.members) - MOST_NAMED} more islands"

    def require_one(self, asked: str) -> None:
        """Raise MachineError if some ranks do not map each other's memory."""
        if not self.is_one:
            raise MachineError(asked, f"{self} {NO_REACH}", "Take a plan whose rows the library moves, as sequential")

    def __str__(self) -> str:
        named = self._named()
        return " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))

    def _named(self) -> list[str]:
        return [f"{ranks_text(island)} on {self.hosts[island[0]]}" for island in self.members]


def one_island(world_size: int) -> Islands:
    """Return the islands of ranks that all map each other's memory."""
    return Islands((tuple(range(world_size)),), ("this host",) * world_size)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text: `rank 3`, `ranks 0-3`, `ranks 0-1, 4`."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


class _Arrival(msgspec.Struct, array_like=True):
    """What a rank tells of itself. kin: the same for ranks that may map each other's memory. address: of its file."""

    software: str
    host: str
    kin: str
    address: bytes
    failure: str = ""


def host_name() -> str:
    """Return how errors call the host of this process: the name of its island, if it was given one."""
    return _short(island_name() or socket.gethostname())


def meet(
    rank: int, size_bytes: int, all_gather_bytes: AllGatherBytes, on_mapped: Callable[[SharedFile], None]
) -> tuple[SharedFile, Islands, bytes]:
    """Find the islands of a group, and create one file for each. Collective; every rank returns, or every rank raises.

    Return this rank's file, the islands, and a secret that all ranks share. on_mapped: run on each file that is kept.
    Raises MachineError where a file cannot be created or mapped, GroupError for ranks with other versions of the
    software, and what `all_gather_bytes` raises.
    """
    own, arrival = _created(size_bytes)
    arrivals = _decoded(all_gather_bytes(msgspec.msgpack.encode(arrival)), arrival)
    _raise_failure(size_bytes, [each.failure for each in arrivals])
    assert own is not None
    shared, leader, failure = own, rank, ""
    try:
        shared, leader = _mapped(own, rank, arrivals)
        on_mapped(shared)
    except OSError as error:
        failure = f"!{_short(str(error))}"
    told = [each.decode() for each in all_gather_bytes((failure or str(leader)).encode())]
    _raise_failure(size_bytes, [each[1:] if each.startswith("!") else "" for each in told])
    leaders = [int(each) for each in told]
    _check_leaders(size_bytes, leaders)
    members = tuple(tuple(at for at, each in enumerate(leaders) if each == first) for first in sorted({*leaders}))
    return shared, Islands(members, tuple(each.host for each in arrivals)), arrivals[0].address


def _created(size_bytes: int) -> tuple[SharedFile | None, _Arrival]:
    """Return a file for this rank and those that join it, and what peers are told."""
    boot = BOOT.read_text() if BOOT.exists() else ""
    kin = blake2b(f"{boot} {island_name()}".encode(), digest_size=8).hexdigest()
    software = _short(", ".join(f"{name} {installed(name)}" for name in SOFTWARE))
    try:
        file = SharedFile.create(size_bytes)
    except OSError as error:
        return None, _Arrival(software, host_name(), kin, b"", _short(str(error)))
    return file, _Arrival(software, host_name(), kin, file.address)


def _short(text: str) -> str:
    return text.encode()[:TOLD_BYTES].decode(errors="ignore")


def _decoded(messages: list[bytes], own: _Arrival) -> list[_Arrival]:
    """Return what the ranks told. Raises GroupError for ranks with other software."""
    asked, arrivals = "meet the ranks of a group that run the same software", list[_Arrival]()
    for rank, message in enumerate(messages):
        try:
            arrivals.append(msgspec.msgpack.decode(message, type=_Arrival))
        except msgspec.DecodeError as error:
            raise GroupError(
                asked, f"rank {rank} speaks as another version of overweave does", SAME_SOFTWARE
            ) from error
    different = {each.software: rank for rank, each in reversed([*enumerate(arrivals)])}
    if len(different) > 1:
        first, second = sorted(different.items(), key=lambda item: item[1])[:2]
        found = f"rank {second[1]} on {arrivals[second[1]].host} has {second[0]}, rank {first[1]} has {first[0]}"
        raise GroupError(asked, found, SAME_SOFTWARE)
    return arrivals


def _mapped(own: SharedFile, rank: int, arrivals: list[_Arrival]) -> tuple[SharedFile, int]:
    """Return the file of the first rank whose memory this one can map, and that rank. Raises OSError."""
    for peer in range(rank):
        if arrivals[peer].kin == arrivals[rank].kin:
            try:
                return SharedFile.open(arrivals[peer].address), peer
            except OutOfReach:
                continue
    return own, rank


def _raise_failure(size_bytes: int, failures: list[str]) -> None:
    """Raise MachineError if a rank failed."""
    for rank, failure in enumerate(failures):
        if failure:
            cure = "Leave memory and open files to spare on every host"
            raise MachineError(f"share {size_bytes} bytes among ranks", f"rank {rank}: {failure}", cure)


def _check_leaders(size_bytes: int, leaders: list[int]) -> None:
    """Raise MachineError if ranks that map one another's memory do not all map that of the same rank."""
    for rank, leader in enumerate(leaders):
        if leaders[leader] != leader:
            found = f"rank {rank} maps the memory of rank {leader}, and not that of rank {leaders[leader]}"
            cure = "Run all ranks of a host as one user, in one container"
            raise MachineError(f"share {size_bytes} bytes among ranks", found, cure)
