"""The typed options that templates take, and the one place where a caller's values for them are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct, convert, to_builtins
from msgspec.structs import replace

from overweave.errors import InputError, nearest
from overweave.ir.plan import MatmulConfig, split_obstacle
from overweave.schedules.communication import Mover, Order, Rotation, SumEngine
from overweave.schedules.moves.gather_templates import SplitAxis
from overweave.schedules.moves.moves import MOST_PROGRAMS
from overweave.schedules.tiles.shape import KernelChoice, Multiplier, TileShape

RowOrder = Literal["own", "cyclic"]
AUTO = "auto"
MOST_LIBRARY_SMS = 24  # that NCCL takes for a collective of a few H200s (hardware/machines/h200x4.json)


class Option(Struct, frozen=True, kw_only=True):
    """One option: a number in `[low, high]`, or one of `choices`. default None: chosen from the problem (`auto`).

    is_list: several such numbers, written `1+2+2`.
    """

    name: str
    meaning: str
    default: int | str | None = None
    low: int = 1
    high: int = 1
    choices: tuple[int | str, ...] = ()
    is_list: bool = False

    @property
    def domain(self) -> str:
        """What may be asked for, as text."""
        named = "|".join(map(str, self.choices)) if self.choices else f"{self.low}..{self.high}"
        named = f"{named}+..." if self.is_list else named
        return f"{named}|{AUTO}" if self.default is None else named

    def parse(self, value: int | str) -> int | str | tuple[int, ...] | None:
        """The value, from a number or from text. Raises InputError."""
        if self.default is None and value == AUTO:
            return None
        if self.is_list:
            found = [_as_int(part) for part in str(value).split("+")]
            numbers = tuple(number for number in found if number is not None and self.low <= number <= self.high)
            if len(numbers) == len(found):
                return numbers
        number = _as_int(value)
        if self.choices:
            match = [choice for choice in self.choices if choice == (number if isinstance(choice, int) else value)]
            if match:
                return match[0]
        elif number is not None and self.low <= number <= self.high and not self.is_list:
            return number
        raise InputError(f"option {self.name}={str(value)[:40]}", "no such value", f"Give one of {self.domain}")


def _as_int(value: int | str) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    if isinstance(value, str) and not (value.isascii() and value.isdecimal() and len(value) <= 9):
        return None
    return int(value)


class Settings(Struct, frozen=True, kw_only=True):
    """The options of one plan, checked. None: chosen from the problem."""

    pieces: int = 1
    own_pieces: int = 1
    sums: SumEngine = "kernel"
    order: Order = "ring"
    rotation: Rotation = "on"
    mover: Mover = "copy_engine"
    carrier: Literal["copy_engine", "library"] | None = "copy_engine"
    copy_programs: int = 16
    col_pieces: int = 1
    island: int | None = None
    axis: SplitAxis = "inner"
    lanes: int = 1
    kernel: KernelChoice = "portable"
    sms: int = 132
    block_m: int | None = None
    block_n: int | None = None
    block_k: int | None = None
    group_m: int | None = None
    stages: int | None = None
    warps: int | None = None
    split_n: int | None = None
    half_tiles: Literal["on", "off"] = "off"
    matmul: Multiplier = "library"
    groups: tuple[int, ...] | None = None
    library_sms: int = 16
    rows: RowOrder = "own"
    links: str | None = None

    def tiles(self, candidates: tuple[TileShape, ...]) -> tuple[TileShape, ...]:
        """Those that are what was asked for; all, if none is."""
        asked = self._asked().items()
        fitting = (one for one in candidates if all(getattr(one.config, name) == value for name, value in asked))
        return tuple(fitting) or candidates

    def _asked(self) -> dict[str, int]:
        return {name: value for name, value in to_builtins(self).items() if name in TILE_SHAPE and value is not None}

    def tile(self, chosen: MatmulConfig) -> MatmulConfig:
        """The chosen tile shape, with whatever was asked for instead. Raises InputError for a tile it cannot run."""
        config = replace(chosen, **self._asked())
        obstacle = split_obstacle(config)
        if obstacle and self.split_n is not None:
            cure = "Use split_n=1, or 3 for block_n=192, 5 for block_n=160"
            raise InputError(f"split_n={self.split_n}", obstacle, cure)
        if obstacle:
            ways = (replace(config, split_n=split_n) for split_n in (1, 3, 5))
            config = next((one for one in ways if not split_obstacle(one)), replace(config, split_n=1))
        if split_obstacle(config):
            raise InputError(f"block_n={config.block_n}", split_obstacle(config), "Use 128|256, or kernel=hopper")
        if config.kernel == "hopper" and config.block_m < 64:
            raise InputError(f"block_m={config.block_m}", "kernel hopper needs 64 rows", "Use 64|128|256")
        return config


TILE_SHAPE = ("block_m", "block_n", "block_k", "group_m", "stages", "warps", "split_n")
_BLOCKS = (16, 32, 64, 128, 256)
ORDER = Option(
    name="order", default="ring", choices=("ring", "all_peers"), meaning="peers one after the other, or all at once"
)
ALL_PEERS = replace(ORDER, default="all_peers")
CARRIER = Option(
    name="carrier",
    default="copy_engine",
    choices=("copy_engine", "library"),
    meaning="who brings chunks: the copy engine, in the order asked for; or the library, by one call for a step",
)
CROSSING = replace(
    CARRIER,
    default=None,
    meaning="who carries what crosses between islands: the library, in calls beside the tiles, or the copy engine; "
    "auto: the library where ranks of some islands map no memory of others",
)
ROTATION = Option(
    name="rotation",
    default="on",
    choices=("on", "off"),
    meaning="each rank begins with the peer next to it; off: all with rank 0, as a matter of study",
)
OWN_PIECES = Option(
    name="own_pieces", default=4, high=64, meaning="parts of the own shard, each summed by a kernel beside the next one"
)
SUMS = Option(
    name="sums",
    default="kernel",
    choices=("kernel", "epilogue"),
    meaning="who adds the peers' partials: a kernel beside the last tiles, or the own tiles themselves as they end",
)
PIECES = Option(name="pieces", default=2, high=64, meaning="chunks per shard")
COL_PIECES = Option(name="col_pieces", default=1, high=16, meaning="chunks of a shard side by side, by columns")
ISLAND = Option(
    name="island", high=1024, meaning="ranks that lie side by side in the mesh; auto: pairs where these are even"
)
AXIS = Option(
    name="axis", default="inner", choices=("inner", "outer"), meaning="ranks met first: inside an island, or across"
)
LANES = Option(name="lanes", default=1, high=8, meaning="moves of a rank that are under way at once")
MOVER = Option(
    name="mover",
    default="copy_engine",
    choices=("copy_engine", "copy_kernel", "bulk_kernel"),
    meaning="who pushes chunks: the copy engine, or a kernel on SMs of its own, by loads and stores or by bulk copies",
)
ANY_MOVER = replace(
    MOVER,
    choices=(*MOVER.choices, "tiles", "bulk_tiles"),
    meaning=f"{MOVER.meaning}; or the programs that compute, between their tiles, in the same two ways",
)
COPY_PROGRAMS = Option(
    name="copy_programs", default=16, high=MOST_PROGRAMS, meaning="SMs of the kernel that pushes chunks"
)
MATMUL = Option(
    name="matmul",
    default="library",
    choices=("library", "skinny", "early"),
    meaning="the library's, or our kernel of few rows; early: it and the exchange start before each other's end",
)
GROUPS = Option(
    name="groups",
    high=1 << 16,
    is_list=True,
    meaning="waves of tiles behind which a library collective of theirs starts, group by group; together all waves",
)
LIBRARY_SMS = Option(
    name="library_sms",
    high=512,
    meaning=f"SMs that tiles leave to the library's collectives beside them; auto: {MOST_LIBRARY_SMS}, or half of them",
)
ROWS = Option(
    name="rows",
    default="own",
    choices=("own", "cyclic"),
    meaning="rows of a rank: its shard; or strips of a tile's rows in turn, and the call returns the map, too",
)
TILES = (
    Option(
        name="kernel", default="portable", choices=("portable", "hopper"), meaning="the tile kernel; hopper needs sm_90"
    ),
    Option(name="sms", default=132, high=1024, meaning="SMs of the GPU, by which tile shapes are judged"),
    Option(name="block_m", choices=_BLOCKS, meaning="rows of a tile"),
    Option(
        name="block_n",
        choices=(*_BLOCKS[:4], 160, 192, 256),
        meaning="columns of a tile; 160, 192: kernel hopper",
    ),
    Option(name="block_k", choices=_BLOCKS[:4], meaning="steps of the main loop along k"),
    Option(name="group_m", high=1024, meaning="tile rows that run together, to reuse `b` in L2"),
    Option(name="stages", high=8, meaning="steps of the main loop in flight"),
    Option(name="warps", choices=(1, 2, 4, 8), meaning="warps of a program"),
    Option(name="split_n", choices=(1, 2, 3, 4, 5), meaning="tiles that a tile of the last wave may be cut into"),
    Option(
        name="half_tiles",
        default="off",
        choices=("on", "off"),
        meaning="tiles of at most half the largest one's elements: where a shard has few, more of them find an SM",
    ),
)


def settle(asked: str, known: tuple[Option, ...], values: Mapping[str, str | int]) -> Settings:
    """The values of all known options. Raises InputError that names the valid ones."""
    by_name = {option.name: option for option in known}
    for name in values:
        if name not in by_name:
            valid = [f"{option.name}={option.domain}" for option in known]
            cure = nearest("Valid options", name, valid, "overweave show")
            raise InputError(f"option {str(name)[:40]} of {asked}", "unknown", cure)
    parsed = {name: by_name[name].parse(value) for name, value in values.items()}
    settled = {option.name: parsed.get(option.name, option.default) for option in known}
    if settled.get(LIBRARY_SMS.name, 0) is None:
        settled[LIBRARY_SMS.name] = min(MOST_LIBRARY_SMS, int(str(settled.get("sms", 132))) // 2)
    return convert(settled, Settings)
