"""Which described machine a GPU belongs to: found by what the GPU is, and by how it is joined to others.

A described machine says of its GPUs what a driver tells of them: names, compute capability, SMs and memory. Where none
says the same, the nearest one stands in, scaled to the SMs that are there, and every answer says so.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from math import inf, log2
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from overweave.hardware.machine import UNKNOWN_LINKS, Card, LinkKind, Machine, load, names
from overweave.hardware.topology import widened

Basis = Literal["calibrated", "measured", "guess", "nearest"]
# By how much the margin grows that a plan must be predicted to gain before it is taken unmeasured.
DOUBTS: dict[Basis, float] = {"calibrated": 1.0, "measured": 1.0, "guess": 2.0, "nearest": 3.0}
MOST_GPUS = 8  # of one host, where a described machine has fewer: it stands for a larger one of its kind
SAME_MEMORY = 1.08  # drivers keep a few percent of it to themselves
# What tells machines apart, in factors of two of SMs and memory: another compute capability, each generation between,
# and other links.
OTHER_KIND, A_GENERATION, OTHER_LINKS = 1.0, 0.5, 2.0


class Gpu(Struct, frozen=True):
    """A GPU as its driver tells it. joined: `unknown` where its links are hidden, or it is alone."""

    name: str
    capability: tuple[int, int]
    sms: int
    memory_gib: float
    joined: LinkKind = UNKNOWN_LINKS


class MachineMatch(Struct, frozen=True):
    """The described machine that predictions are made on: its name, or its file.

    basis: `calibrated`, by `overweave calibrate` on this machine; `measured`, on such a machine; `guess`, from data
    sheets; `nearest`, that of another GPU. gpu: what was looked for; None where a machine was named. digest: of a file.
    """

    machine: str
    basis: Basis
    gpu: Gpu | None = None
    digest: str = ""

    @property
    def doubt(self) -> float:
        """By how much margins grow."""
        return DOUBTS[self.basis]

    @property
    def is_sure(self) -> bool:
        """Whether its numbers were measured on such a machine, and the driver tells that it is one."""
        return self.basis in ("calibrated", "measured") and not self._is_hidden

    @property
    def _is_hidden(self) -> bool:
        return self.gpu is not None and self.gpu.joined == UNKNOWN_LINKS

    def __str__(self) -> str:
        """The machine, its GPUs, and how well they are known."""
        machine = load(self.machine)
        told = f"{machine.name} ({machine.title})"
        if self.basis == "nearest" and self.gpu is not None:
            joined = "" if self.gpu.joined == UNKNOWN_LINKS else f" joined by {self.gpu.joined}"
            return (
                f"{self.gpu.name}{joined} is described nowhere: {told} is the nearest, scaled to {self.gpu.sms} SMs: a "
                "guess, whose margins are tripled; `overweave calibrate` measures this machine"
            )
        words: dict[Basis, str] = {
            "calibrated": "measured on this machine by `overweave calibrate`",
            "measured": "measured",
            "guess": "a guess from data sheets, whose margins are doubled",
            "nearest": "the nearest",
        }
        links = "; no links are seen: it is known by its name alone" if self._is_hidden else ""
        return f"{told}: {words[self.basis]}{links}"


OF_H200 = MachineMatch("h200x4", "measured")


def named(machine: str) -> MachineMatch:
    """A machine by its name or file, as a command's `--machine` gives it. Raises InputError and MachineFileError."""
    found = load(machine)
    digest = file_digest(Path(machine).read_bytes()) if machine.endswith(".json") else ""
    return MachineMatch(machine, found.basis, digest=digest)


def file_digest(data: bytes) -> str:
    """Of a machine's file: equal where ranks predict on the same numbers."""
    return blake2b(data, digest_size=6).hexdigest()


@lru_cache(maxsize=64)
def find(gpu: Gpu) -> MachineMatch:
    """The described machine of a GPU: the one that says the same of it, or the nearest one."""
    known = [machine for machine in map(load, names()) if machine.card is not None]
    same = [machine for machine in known if machine.card and _is_same(gpu, machine, machine.card)]
    if same:
        return MachineMatch(same[0].name, same[0].basis, gpu)
    nearest = min(known, key=lambda machine: (_distance(gpu, machine), machine.name))
    return MachineMatch(nearest.name, "nearest", gpu)


@lru_cache(maxsize=256)
def machine_for(found: MachineMatch, world_size: int) -> Machine | None:
    """The description of a found machine, with GPUs for so many ranks; None where it cannot have as many."""
    machine = load(found.machine)
    if found.basis == "nearest" and found.gpu is not None:
        machine = _stood_in(machine, found.gpu)
    if world_size <= machine.gpus:
        return machine
    topology = widened(machine.topology, machine.gpus, world_size) if world_size <= MOST_GPUS else None
    return None if topology is None else replace(machine, gpus=world_size, topology=topology)


def _is_same(gpu: Gpu, machine: Machine, card: Card) -> bool:
    apart = gpu.memory_gib / card.memory_gib
    return (
        gpu.name.lower() in [name.lower() for name in card.names]
        and gpu.capability == card.capability
        and gpu.sms == machine.processor.sms
        and 1 / SAME_MEMORY <= apart <= SAME_MEMORY
        and gpu.joined in (card.joined, UNKNOWN_LINKS)
    )


def _distance(gpu: Gpu, machine: Machine) -> float:
    """How unlike a machine's GPUs are."""
    card = machine.card
    if card is None:
        return inf
    generations = abs((gpu.capability[0] - card.capability[0]) + (gpu.capability[1] - card.capability[1]) / 10)
    sizes = abs(log2(max(gpu.sms, 1) / machine.processor.sms)) + abs(log2(max(gpu.memory_gib, 0.1) / card.memory_gib))
    links = OTHER_LINKS if gpu.joined not in (card.joined, UNKNOWN_LINKS) else 0.0
    kind = 0.0 if gpu.capability == card.capability else OTHER_KIND
    return kind + A_GENERATION * generations + sizes + links


def _stood_in(machine: Machine, gpu: Gpu) -> Machine:
    """A machine with another GPU's SMs, each as fast as its own; without rates of our kernels where the GPU is of
    another kind than they were tuned for.
    """
    sms = max(gpu.sms, 1)
    scale = sms / machine.processor.sms
    is_alike = machine.card is not None and machine.card.capability == gpu.capability
    tiles = tuple(
        replace(tile, tflops=tile.tflops * scale) for tile in machine.tiles if is_alike or tile.kernel == "library"
    )
    return replace(machine, processor=replace(machine.processor, sms=sms), tiles=tiles)
