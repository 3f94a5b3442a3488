"""What a method is, as data: who multiplies, moves and adds, what can be asked of it, what it needs, when it is taken.

Every other file asks a record; none asks for a method by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Literal, Protocol

from msgspec import Struct

from overweave.ir.plan import (
    COPY_ENGINE,
    COPY_KERNEL,
    LIBRARY,
    PACKED_KERNEL,
    REDUCE_KERNEL,
    TILE_KERNEL,
    Engine,
    MatmulConfig,
    PartialSums,
    ReduceConfig,
)
from overweave.ir.problem import Problem
from overweave.ir.schedule import CREDITS, Range
from overweave.schedules.communication import Communication, Mover, Split
from overweave.schedules.records.options import Option, Settings
from overweave.schedules.tiles.shape import has_second_wave

SettingValue = str | int
Grid = Mapping[str, tuple[SettingValue, ...]]
# Of sums: by rank; round a ring, from the owner's successor to the owner; as partials arrive; as the library adds; as
# parts meet on their ways to the owner, each sum by rank.
AddingOrder = Literal["rank", "ring", "arrival", "library", "ways"]
# What refuses a method: any device, by the schedule alone; a device; or the choice among methods, where it can run but
# another one is known to be better.
Stage = Literal["schedule", "device", "choice"]
# How what other compilers decided becomes a plan (`overweave.lower`): the library's collectives, puts by a template, or
# puts that are searched for a machine's links.
LoweringPath = Literal["direct", "template", "synth"]
Reuse = Literal["credits", "echoes"]  # how it is known that a later call may write what an earlier one read
MODEL_SMS = 132  # of the GPU whose measurements the margins are


class DeviceTraits(Protocol):
    """What a need may ask of a device: its kind (cpu, cuda), whether it is sm_90, and whether it has peer access: it
    reads and writes the memory of the other GPUs. has_tuned_kernels: rates of our tile kernels are known there.
    parted: which ranks lie on which of several islands, as text; empty where that is one. island_access: the
    same as peer_access inside each island alone.
    has_far_pairs: some pairs of GPUs are joined by other links than the rest. links: the described machine whose GPUs
    are joined as they are, by more than one switch; empty where that is none.
    """

    @property
    def kind(self) -> str: ...
    @property
    def is_hopper(self) -> bool: ...
    @property
    def peer_access(self) -> bool: ...
    @property
    def island_access(self) -> bool: ...
    @property
    def parted(self) -> str: ...
    @property
    def has_tuned_kernels(self) -> bool: ...
    @property
    def has_far_pairs(self) -> bool: ...
    @property
    def links(self) -> str: ...


class MethodRequest(Struct, frozen=True):
    """What is asked of a method: a problem, with options, on a device (None: on any)."""

    problem: Problem
    options: Mapping[str, SettingValue] = {}
    device: DeviceTraits | None = None


class Need(Struct, frozen=True):
    """One thing that a method needs. why: what is said where it is missing, or nothing. stage: who asks for it."""

    stage: Stage
    why: Callable[[MethodRequest], str]


class Adds(Struct, frozen=True):
    """How partials become sums. by: the engine that ends them. precision: as in `Realization.partial_sums`: of sums
    that are added to again.
    """

    by: Engine
    order: AddingOrder = "rank"
    precision: PartialSums = "float32"


# Why the bits of a row depend on how many rows a call has, where they do: by who multiplies, by the order in which
# parts are added, and by who adds. A row's owner, and the size of a library's call, depend on the number of rows.
MULTIPLIED_BY_ROWS: Mapping[Engine, str] = {
    LIBRARY: "the library picks the kernel of its matmul, and with it the order over k, by the number of rows"
}
ADDED_BY_ROWS: Mapping[AddingOrder, str] = {
    "ring": "sums go round a ring that begins behind a row's owner",
    "arrival": "parts are added as they arrive, in no order",
    "library": "the library picks the order of its sums by their size",
    "ways": "parts meet on their ways to a row's owner",
}
ENDED_BY_OWNER: Mapping[Engine, str] = {
    TILE_KERNEL: "a row's owner adds its own product unrounded to parts of others that are rounded",
    LIBRARY: "parts are added island by island, a row's owner's first",
}


class Margin(Struct, frozen=True):
    """What a plan must be predicted to gain over the library path before it is taken unmeasured."""

    us: float
    share: float


class MarginCase(Struct, frozen=True, kw_only=True):
    """When a margin holds: for so many ranks and weights (None: any), at least so many waves of tiles of each rank's
    shard (1, or 2), and these values of options.
    """

    margin: Margin
    ranks: int | None = None
    weights: int | None = None
    waves: int = 1
    options: Mapping[str, SettingValue] = {}

    def holds(self, problem: Problem, options: Mapping[str, SettingValue]) -> bool:
        return (
            self.ranks in (None, problem.world_size)
            and self.weights in (None, len(problem.widths))
            and all(options.get(name) == value for name, value in self.options.items())
            and (self.waves == 1 or has_second_wave(problem.m, problem.n, problem.world_size, MODEL_SMS))
        )


class MethodInputs(Struct, frozen=True):
    """What a method writes the moves of. sums: the tiles of a reduction kernel. held: each rank's part of the reduced
    axis, where partials are added.
    """

    problem: Problem
    settings: Settings
    config: MatmulConfig | None
    split: Split
    sums: ReduceConfig
    held: tuple[Range, ...]
    method: Method


class Method(Struct, frozen=True, kw_only=True):
    """One method of one operator.

    source: the paper, or the library, that the method comes from.
    transport: how authors' kernels ask for it, of a tensor; empty: by its collective and name, where it is enough that
    their tiles wait for it, or signal.
    write: the moves, with a `MatmulChunk` where tiles or a library matmul have their part. None: a builder of the
    operator's own writes all. multiplies, moves: by which engines. has_levels: the library carries what crosses between
    islands, unless carrier=copy_engine is asked for. adds: how, if it does. norms: the engine that ends with whole rows
    of a sum, which it may norm. reuse: the protocol by which buffers are written again.
    grids: what the tuner tries, the combinations of each grid's values; none: it is run only where it is named.
    dropped: why the source of a design space goes on without this point of it, which the tuner then does not try.
    margins: the first case that holds; none: as `margin` says.
    lowering: the path by which placements of other compilers take it; None: they do not.
    """

    operator: str
    name: str
    summary: str
    source: str = ""
    dropped: str = ""
    transport: str = ""
    write: Callable[[MethodInputs], Communication] | None = None
    multiplies: Engine = LIBRARY
    moves: tuple[Engine, ...] = (LIBRARY,)
    has_levels: bool = False
    adds: Adds | None = None
    norms: Engine | None = None
    reuse: Reuse = CREDITS
    options: tuple[Option, ...] = ()
    needs: tuple[Need, ...] = ()
    grids: tuple[Grid, ...] = ()
    margins: tuple[MarginCase, ...] = ()
    lowering: LoweringPath | None = None

    @property
    def full_name(self) -> str:
        return f"{self.operator}.{self.name}"

    @property
    def engines(self) -> frozenset[Engine]:
        return frozenset((self.multiplies, *self.moves, *((self.adds.by,) if self.adds else ())))

    @property
    def is_plain(self) -> bool:
        return self.engines == {LIBRARY}

    @property
    def is_fused(self) -> bool:
        return self.multiplies == TILE_KERNEL

    def crosses_islands(self, options: Mapping[str, SettingValue]) -> bool:
        """Whether it addresses peers of other islands, too."""
        is_left = self.has_levels and options.get("carrier") != COPY_ENGINE
        return self.addresses_peers(options) and not is_left

    @property
    def has_library_beside(self) -> bool:
        """Whether library calls run beside the tiles of a kernel, which leaves SMs to them."""
        return self.is_fused and LIBRARY in self.moves

    @property
    def has_kernels(self) -> bool:
        """Whether a kernel of ours runs, whose rows must start at multiples of 16 bytes."""
        return not self.engines <= {LIBRARY, COPY_ENGINE}

    def addresses_peers(self, options: Mapping[str, SettingValue]) -> bool:
        """Whether it reads or writes the memory of other GPUs: rows move by more than the library's collectives."""
        is_left = options.get("carrier") == LIBRARY and not self.has_levels
        return not is_left and not {*self.moves} <= {LIBRARY, REDUCE_KERNEL}

    @property
    def has_messages(self) -> bool:
        return PACKED_KERNEL in self.moves

    @property
    def mover(self) -> Mover | None:
        """Who carries what moves, where that is no option."""
        return "tiles" if TILE_KERNEL in self.moves else "copy_kernel" if COPY_KERNEL in self.moves else None

    @property
    def stores_round_a_ring(self) -> bool:
        """Whether tiles store sums straight at the next rank, whose tiles add to them."""
        return TILE_KERNEL in self.moves and self.adds is not None and self.adds.order == "ring"

    @property
    def varies_with_rows(self) -> str:
        """Why the bits of a row depend on how many rows a call has; empty where they do not, of one shape of tiles."""
        found = MULTIPLIED_BY_ROWS.get(self.multiplies, "")
        if found or self.adds is None:
            return found
        return ADDED_BY_ROWS.get(self.adds.order, "") or ENDED_BY_OWNER.get(self.adds.by, "")

    def takes(self, option: str) -> bool:
        return any(known.name == option for known in self.options)

    def margin(self, problem: Problem, options: Mapping[str, SettingValue]) -> Margin:
        """What it must gain by prediction: by the first case that holds, else by who drives it."""
        found = (case.margin for case in self.margins if case.holds(problem, options))
        return next(found, WITH_KERNELS if self.has_kernels else OF_LIBRARY)


def combinations(grid: Grid) -> Iterator[dict[str, SettingValue]]:
    """Every choice of one value for each option."""
    for values in product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


# Fixed costs of small calls that the simulation misses; plans of many library calls also cost the
# host 100 us and more.
# MEASURED: on 72 rows (small and mlp, W=2 and 4) the choice loses less than 1 % in the mean, and 3 to 5 % without these
# margins (H200, 2026-11-20; `python -m campaigns.cold_choice`).
WITH_KERNELS, OF_LIBRARY = Margin(10.0, 0.02), Margin(25.0, 0.03)
