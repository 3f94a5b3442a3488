"""Which described machine a GPU belongs to, by what the driver says of the GPU and its links.

A described machine lists the names, compute capability, SMs and memory of its GPUs. If no machine matches, the nearest
one is scaled to the GPU's SMs, and every answer says so.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from math import inf, log2
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from overweave.hardware.machine import MOST_GPUS, UNKNOWN_LINKS, Card, LinkKind, Machine, load, names
from overweave.hardware.topology import placed, with_more_gpus

Basis = Literal["calibrated", "measured", "guess", "nearest"]
# Basis -> factor on the margin that a plan must be predicted to gain before it is taken unmeasured.
DOUBTS: dict[Basis, float] = {"calibrated": 1.0, "measured": 1.0, "guess": 2.0, "nearest": 3.0}
MOST_OF_ONE_HOST = 8  # up to so many GPUs a described host is extended to a larger one of its kind
SAME_MEMORY = 1.08  # largest ratio of equal memories: drivers reserve a few percent
# Distances of machines, in factors of two of SMs and memory: another compute capability, each generation between, and
# other links.
OTHER_KIND, A_GENERATION, OTHER_LINKS = 1.0, 0.5, 2.0


class Gpu(Struct, frozen=True):
    """A GPU as its driver reports it. joined: `unknown` if its links are hidden, or it is alone."""

    name: str
    capability: tuple[int, int]
    sms: int
    memory_gib: float
    joined: LinkKind = UNKNOWN_LINKS


class MachineMatch(Struct, frozen=True):
    """The described machine that predictions are made on: its name, or its file.

    basis: `calibrated`, by `overweave calibrate` on this machine; `measured`, on such a machine; `guess`, from data
    sheets; `nearest`, of another GPU. gpu: the GPU that was looked up; None if the machine was named. digest: of a
    file.
    """

    machine: str
    basis: Basis
    gpu: Gpu | None = None
    digest: str = ""

    @property
    def doubt(self) -> float:
        """Return the factor on margins."""
        return DOUBTS[self.basis]

    @property
    def is_sure(self) -> bool:
        """Whether its numbers were measured on such a machine, and the driver confirms that this is one."""
        return self.basis in ("calibrated", "measured") and not self._is_hidden

    @property
    def _is_hidden(self) -> bool:
        return self.gpu is not None and self.gpu.joined == UNKNOWN_LINKS

    def __str__(self) -> str:
        """Return the machine, its GPUs, and how well they are known."""
        machine = load(self.machine)
        name = f"{machine.name} ({machine.title})"
        if self.basis == "nearest" and self.gpu is not None:
            joined = "" if self.gpu.joined == UNKNOWN_LINKS else f" joined by {self.gpu.joined}"
            return (
                f"{self.gpu.name}{joined} is described nowhere: {name} is the nearest, scaled to {self.gpu.sms} SMs: a "
                "guess, whose margins are tripled; `overweave calibrate` measures this machine"
            )
        words: dict[Basis, str] = {
            "calibrated": "measured on this machine by `overweave calibrate`",
            "measured": "measured",
            "guess": "a guess from data sheets, whose margins are doubled",
            "nearest": "the nearest",
        }
        links = "; no links are seen: it is known by its name alone" if self._is_hidden else ""
        return f"{name}: {words[self.basis]}{links}"


H200 = MachineMatch("h200x4", "measured")


def machine_named(machine: str) -> MachineMatch:
    """Return a machine by its name or file, as `--machine` takes it. Raises InputError and MachineFileError."""
    described = load(machine)
    digest = file_digest(Path(machine).read_bytes()) if machine.endswith(".json") else ""
    return MachineMatch(machine, described.basis, digest=digest)


def file_digest(data: bytes) -> str:
    """Return the digest of a machine file: equal if ranks predict on the same numbers."""
    return blake2b(data, digest_size=6).hexdigest()


@lru_cache(maxsize=64)
def find(gpu: Gpu) -> MachineMatch:
    """Return the described machine of a GPU, one host: one that matches, or the nearest one."""
    described = [machine for machine in _described() if not machine.topology.has_hosts]
    same = [machine for machine in described if machine.card and _is_same(gpu, machine, machine.card)]
    if same:
        return MachineMatch(same[0].name, same[0].basis, gpu)
    nearest = min(described, key=lambda machine: (_distance(gpu, machine), machine.name))
    return MachineMatch(nearest.name, "nearest", gpu)


@lru_cache(maxsize=256)
def machine_for(found: MachineMatch, world_size: int, islands: tuple[tuple[int, ...], ...] = ()) -> Machine | None:
    """Return the description of a machine with GPUs for `world_size` ranks; None if it cannot have as many. islands:
    the ranks of each of several hosts; (): as the description has them."""
    machine = load(found.machine)
    if found.basis == "nearest" and found.gpu is not None:
        machine = _scaled_to(machine, found.gpu)
    if len(islands) > 1:
        return _on_hosts(machine, islands)
    if world_size <= machine.gpus:
        return machine
    has_hosts = machine.topology.has_hosts
    most = MOST_GPUS if has_hosts else MOST_OF_ONE_HOST
    topology = with_more_gpus(machine.topology, machine.gpus, world_size) if world_size <= most else None
    return None if topology is None else replace(machine, gpus=world_size, topology=topology)


def machine_of_ranks(name: str, world_size: int) -> Machine:
    """Return a machine by its name or file, with as many GPUs as ranks if it stands for larger ones, else as it is.
    Raises InputError and MachineFileError."""
    return machine_for(machine_named(name), world_size) or load(name)


def _described() -> list[Machine]:
    return [machine for machine in map(load, names()) if machine.card is not None]


def hosts_like(machine: Machine) -> Machine | None:
    """Return the described machine of several hosts of such GPUs: itself, if it is one; None if there is none."""
    if machine.topology.has_hosts or machine.card is None:
        return machine if machine.topology.has_hosts else None
    known = {name.lower() for name in machine.card.names}
    alike = (other for other in _described() if other.card and known & {name.lower() for name in other.card.names})
    return min((other for other in alike if other.topology.has_hosts), key=lambda other: other.gpus, default=None)


def _on_hosts(machine: Machine, islands: tuple[tuple[int, ...], ...]) -> Machine | None:
    """Return a machine on several hosts, joined as those of its GPUs are that are described; None if none are."""
    hosts = hosts_like(machine)
    topology = None if hosts is None else placed(hosts.topology, islands)
    return None if topology is None else replace(machine, gpus=sum(map(len, islands)), topology=topology)


def _is_same(gpu: Gpu, machine: Machine, card: Card) -> bool:
    """Whether a machine's GPUs match; links may be unknown."""
    apart = gpu.memory_gib / card.memory_gib
    return (
        gpu.name.lower() in [name.lower() for name in card.names]
        and gpu.capability == card.capability
        and gpu.sms == machine.processor.sms
        and 1 / SAME_MEMORY <= apart <= SAME_MEMORY
        and gpu.joined in (card.joined, UNKNOWN_LINKS)
    )


def _distance(gpu: Gpu, machine: Machine) -> float:
    """Return how unlike a machine's GPUs are."""
    card = machine.card
    if card is None:
        return inf
    generations = abs((gpu.capability[0] - card.capability[0]) + (gpu.capability[1] - card.capability[1]) / 10)
    sizes = abs(log2(max(gpu.sms, 1) / machine.processor.sms)) + abs(log2(max(gpu.memory_gib, 0.1) / card.memory_gib))
    links = OTHER_LINKS if gpu.joined not in (card.joined, UNKNOWN_LINKS) else 0.0
    kind = 0.0 if gpu.capability == card.capability else OTHER_KIND
    return kind + A_GENERATION * generations + sizes + links


def _scaled_to(machine: Machine, gpu: Gpu) -> Machine:
    """Return a machine with another GPU's SMs, each as fast as its own. It has no rates of our kernels if the GPU has
    another compute capability than they were tuned for."""
    sms = max(gpu.sms, 1)
    scale = sms / machine.processor.sms
    is_alike = machine.card is not None and machine.card.capability == gpu.capability
    tiles = tuple(
        replace(tile, tflops=tile.tflops * scale) for tile in machine.tiles if is_alike or tile.kernel == "library"
    )
    return replace(machine, processor=replace(machine.processor, sms=sms), tiles=tiles)
