"""The description of a machine: numbers, each with its source, and the machines that were measured.

A machine is a JSON file: one of the package's in `machines/`, or one that `overweave calibrate` wrote.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import pairwise
from math import log2
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

from overweave.errors import InputError, MachineFileError, nearest
from overweave.hardware.topology import (
    Bandwidth,
    Curve,
    Points,
    Positive,
    Routes,
    SmCurve,
    Topology,
    check,
    interpolated_us,
    routes,
)
from overweave.untrusted import check_keys, check_words, read_bytes

_UNKNOWN_FIELD = re.compile("unknown field `([^`]*)`")


def values_of(data: bytes, most_bytes: int) -> object:
    """Return decoded JSON. Raises msgspec's errors, and ValueError for too many bytes, duplicate keys, unprintable
    words."""
    if len(data) > most_bytes:
        raise ValueError(f"more than {most_bytes} bytes")
    values: object = msgspec.json.decode(data)
    check_keys(data)
    check_words(values)
    return values


def nearest_field(error: str, record: type[Struct]) -> str:
    """Return a cure for msgspec's error about an unknown field; "" for other errors."""
    unknown = _UNKNOWN_FIELD.search(error)
    if unknown is None:
        return ""
    structs, names = [record], set[str]()
    for struct in structs:
        names.update(struct.__struct_fields__)
        kinds = get_type_hints(struct).values()
        structs += [each for kind in kinds for each in _structs_of(kind) if each not in structs]
    return nearest("Fields", unknown.group(1), sorted(names), "docs/how-to/machines.md")


def _structs_of(kind: Any) -> list[type[Struct]]:
    """Return the records that a type is made of."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return [kind]
    return [each for part in get_args(kind) for each in _structs_of(part)]


NotNegative = Annotated[float, Meta(ge=0, le=1e12)]
Whole = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TileSide = Annotated[int, Meta(ge=8, le=2**31 - 1)]  # the smallest side of an MMA tile
MAX_BYTES = 2**20  # of a file
MOST_GPUS, MOST_SMS = 1024, 4096
LinkKind = Literal["nvswitch", "nvlink", "pcie", "unknown"]
UNKNOWN_LINKS: LinkKind = "unknown"
NOT_INHERITED = ("basis", "card")  # fields that `like` does not copy
WITH_TILES = "attention"  # a field that it does not copy to a machine of other tensor cores, which has tiles of its own
FARTHEST = 2.0  # powers of two from a layer to the nearest measured one, up to which that one's times are used


class CollectiveCurve(Struct, frozen=True, forbid_unknown_fields=True):
    """Points (total bytes, GB/s) of an NCCL collective alone, as a whole call is timed.

    Total is what all ranks hold together after an all-gather or before a reduce-scatter, and what each holds after an
    all-reduce; GB/s count the bytes that cross each rank's port, `(world_size - 1) / world_size` of the total. (An
    all-reduce moves at least twice as many.) one_shot, two_shot: torch's, on symmetric memory.
    """

    function: Literal["all_gather", "reduce_scatter", "all_reduce", "one_shot_all_reduce", "two_shot_all_reduce"]
    world_size: Whole
    points: Points
    source: str


class TileRate(Struct, frozen=True, forbid_unknown_fields=True):
    """Rate of tiles `[block_m, block_n]` of a bf16 matmul on all SMs together, by one of our kernels or cuBLAS
    (`library`).

    tflops: main loop only. overhead_us: prologue and epilogue of one tile that the next tile does not hide.
    """

    kernel: Literal["portable", "hopper", "library"]
    block_m: TileSide
    block_n: TileSide
    tflops: Positive
    overhead_us: NotNegative
    source: str


Pass = Literal["forward", "backward"]


# Of the quickest tile of cuBLAS: what torch's attention reaches. MEASURED: machines/h200x4.json, heads of 128 columns.
ATTENTION_SHARES: dict[Pass, float] = {"forward": 0.77, "backward": 0.64}
ATTENTION_OVERHEAD_US = 10.0


class AttentionRate(Struct, frozen=True, forbid_unknown_fields=True):
    """Rate of torch's attention of 16 bits with heads of `head_dim` columns, alone and on all SMs.

    tflops: 4 operations a column for each pair of a query and a key that it sees, forward; 10 backward. overhead_us: of
    a kernel, beyond that.
    """

    direction: Pass
    head_dim: Whole
    tflops: Positive
    overhead_us: NotNegative
    source: str


class DtypeRate(Struct, frozen=True, forbid_unknown_fields=True):
    """Rate of a dtype as a fraction of bf16's."""

    dtype: str
    share: Positive
    source: str


class Latency(Struct, frozen=True, forbid_unknown_fields=True):
    us: NotNegative
    source: str


class Share(Struct, frozen=True, forbid_unknown_fields=True):
    """A factor on time."""

    factor: Positive
    source: str


UNSLOWED = Share(1.0, "the default of files: beside a collective a matmul loses SMs only")


class HeldSms(Struct, frozen=True, forbid_unknown_fields=True):
    """SMs that a kernel holds while it runs."""

    sms: Whole
    source: str


class PeerAccess(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a GPU can read and write the memory of the others; if not, only NCCL moves rows."""

    is_there: bool
    source: str


ADDRESSED = PeerAccess(True, "the default of files: plans of ours or of papers address peers on such GPUs")


class ElementWise(Struct, frozen=True, forbid_unknown_fields=True):
    """Bandwidth of torch's element-wise kernels that convert between dtypes: bytes read plus written, without launch.
    widen: 16 bits to fp32. add: 16 bits onto fp32, in place. narrow: fp32 to 16 bits."""

    widen: Bandwidth
    add: Bandwidth
    narrow: Bandwidth


class Processor(Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU's SMs."""

    sms: Annotated[int, Meta(ge=1, le=MOST_SMS)]
    source: str


class LocalCopies(Struct, frozen=True, forbid_unknown_fields=True):
    """Copies within a GPU: by a DMA engine of its own, or by a kernel that needs SMs. GB/s: read plus written."""

    by: Literal["dma", "sms"]
    gb_per_s: Positive
    source: str


class Links(Struct, frozen=True, forbid_unknown_fields=True):
    """Bandwidth between peers, as far as the links of the topology allow it.

    push, pull: one copy by a copy engine over a route, all ranks active. all_peers: the sum over the copies that share
    a port. strided: factor on time if rows are not contiguous. sm_pull, sm_push: loads and stores by kernels, from and
    to all peers together.
    """

    push: Curve
    pull: Curve
    all_peers: Curve
    strided: Share
    sm_pull: SmCurve
    sm_push: SmCurve


class Latencies(Struct, frozen=True, forbid_unknown_fields=True):
    """Latencies of the steps of a call.

    call: between the events around any call, beyond what runs in it. begin: the prologue kernel of a call, which zeroes
    pads and waits for credits. kernel: from the end of a kernel to the start of the next one of its stream. graph: from
    the end of `begin` to the first copy of its copy graph. signal: from a kernel's release to its visibility. flag: a
    stream write behind a copy, in the copy's queue. observe: from visibility to the end of a kernel's wait, also if the
    signal is there already. stream_wait: the same for a stream. join: from the end of a side stream to the caller's
    stream going on. reduce_tile, copy_tile: a tile of the ordered reduction, or of a push by a kernel, beyond its
    bytes.
    """

    call: Latency
    begin: Latency
    kernel: Latency
    graph: Latency
    signal: Latency
    flag: Latency
    observe: Latency
    stream_wait: Latency
    join: Latency
    reduce_tile: Latency
    copy_tile: Latency


class Sharing(Struct, frozen=True, forbid_unknown_fields=True):
    """What kernels lose to concurrent work.

    copy_engine: factor on their time while a rank's ports carry full copy-engine traffic. collective: the SMs that an
    NCCL collective holds, from its start until its end. library_matmul: factor on the time of cuBLAS tiles meanwhile,
    on the remaining SMs.
    """

    copy_engine: Share
    collective: HeldSms
    library_matmul: Share = UNSLOWED


class Card(Struct, frozen=True, forbid_unknown_fields=True):
    """What a driver reports of a machine's GPUs, by which they are found (hardware/cards.py). joined: by NVLink to a
    switch, by NVLink to each other, or by PCIe alone."""

    names: Annotated[tuple[str, ...], Meta(min_length=1)]
    capability: tuple[int, int]
    memory_gib: Positive
    joined: LinkKind
    source: str


class FewRows(Struct, frozen=True, forbid_unknown_fields=True):
    """Time that our matmul of few rows saves over cuBLAS in a call of packed messages of one exchange.

    It is measured, not predicted: both read the weight once, and the rest is latencies, which depend on the kernel that
    cuBLAS picks for each size. early: as of SkinnyConfig. rows: the measured numbers of rows, growing. layers: n and k
    of one rank, and the microseconds saved with each number of rows.
    """

    exchange: Literal["sum", "gather"]
    early: bool
    rows: tuple[Whole, ...]
    layers: Annotated[tuple[tuple[Whole, Whole, tuple[float, ...]], ...], Meta(min_length=1)]
    source: str

    def saved_us(self, rows: int, n: int, k: int) -> float:
        """Return the time saved for `[rows, k] @ [k, n]`, linear in the logarithm of the rows; 0 if no layer is
        near."""

        def distance(layer: tuple[int, int, tuple[float, ...]]) -> float:
            return abs(log2(n / layer[0])) + abs(log2(k / layer[1]))

        near = min(self.layers, key=distance)
        if not rows or distance(near) > FARTHEST:
            return 0.0
        for (low, first), (high, last) in pairwise(zip(self.rows, near[2], strict=True)):
            if rows <= high:
                return first + (last - first) * log2(rows / low) / log2(high / low)
        return near[2][-1]


class Machine(Struct, frozen=True, forbid_unknown_fields=True, cache_hash=True):
    """Equal GPUs, joined by `topology`. hbm: bytes read plus bytes written, by kernels that only move. basis: where
    most of its numbers come from: `overweave calibrate`, measurements of such a machine, or data sheets."""

    name: str
    title: str
    gpus: Annotated[int, Meta(ge=1, le=MOST_GPUS)]
    processor: Processor
    hbm: Bandwidth
    local_copies: LocalCopies
    element_wise: ElementWise
    tiles: tuple[TileRate, ...]
    dtypes: tuple[DtypeRate, ...]
    topology: Topology
    links: Links
    collectives: tuple[CollectiveCurve, ...]
    latency: Latencies
    sharing: Sharing
    few_rows: tuple[FewRows, ...] = ()
    attention: tuple[AttentionRate, ...] = ()
    peers: PeerAccess = ADDRESSED
    basis: Literal["calibrated", "measured", "guess"] = "guess"
    card: Card | None = None

    @property
    def peer_access(self) -> bool:
        """Whether a GPU can read and write the memory of the others."""
        return self.peers.is_there

    @property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """Return the GPUs that reach each other's memory, as far as links let them: those of each host."""
        return self.routes.islands

    @property
    def routes(self) -> Routes:
        """Return the links that transfers between its GPUs cross."""
        return routes(self.topology, self.gpus)

    @property
    def engines_gb_per_s(self) -> float:
        """Return the most that copy engines move through a port: one of them alone, or several."""
        return max(self.links.push.peak_gb_per_s, self.links.all_peers.peak_gb_per_s)

    def tiles_of(self, kernel: str) -> tuple[TileRate, ...]:
        """Return the tile shapes of a kernel. Raises InputError."""
        tiles = tuple(tile for tile in self.tiles if tile.kernel == kernel)
        if not tiles:
            known = ", ".join(sorted({tile.kernel for tile in self.tiles}))
            raise InputError(f"matmul kernel on {self.name}", kernel, f"Use one of {known}")
        return tiles

    def tile(self, kernel: str, block_m: int, block_n: int) -> TileRate:
        """Return the rate of a tile shape of a kernel, or of its listed shape nearest in operand reuse. Raises
        InputError."""
        reuse = _reuse(block_m, block_n)

        def distance(tile: TileRate) -> tuple[float, int]:
            return abs(_reuse(tile.block_m, tile.block_n) - reuse), abs(tile.block_m - block_m)

        return min(self.tiles_of(kernel), key=distance)

    def attention_rate(self, direction: Pass, head_dim: int) -> AttentionRate:
        """Return the rate of torch's attention with the nearest heads; without any, a guess by that of matmuls."""
        known = [rate for rate in self.attention if rate.direction == direction]
        if known:
            return min(known, key=lambda rate: abs(log2(rate.head_dim / head_dim)))
        tflops = max(tile.tflops for tile in self.tiles_of("library")) * ATTENTION_SHARES[direction]
        source = "guess: an H200's share of the rate of its matmuls"
        return AttentionRate(direction, head_dim, tflops, ATTENTION_OVERHEAD_US, source)

    def dtype_share(self, dtype: str) -> float:
        """Return the rate of `dtype` over bf16's. Raises InputError."""
        for rate in self.dtypes:
            if rate.dtype == dtype:
                return rate.share
        raise InputError(f"dtype on {self.name}", dtype, f"Use one of {', '.join(rate.dtype for rate in self.dtypes)}")

    def has_measured(self, function: str, world_size: int) -> bool:
        """Whether a collective has a curve for exactly this number of ranks."""
        return any((curve.function, curve.world_size) == (function, world_size) for curve in self.collectives)

    def collective_us(self, function: str, world_size: int, total_bytes: float) -> float:
        """Return the time of an NCCL collective, from the curve of the nearest measured group size. Raises
        InputError."""
        curves = [curve for curve in self.collectives if curve.function == function]
        if not curves:
            known = sorted({curve.function for curve in self.collectives})
            raise InputError(f"collective on {self.name}", function, f"Use one of {', '.join(known)}")
        if world_size < 2:
            return 0.0
        curve = min(curves, key=lambda curve: (abs(curve.world_size - world_size), -curve.world_size))
        share, measured = (world_size - 1) / world_size, (curve.world_size - 1) / curve.world_size
        crossing = tuple((size * measured, rate) for size, rate in curve.points)
        return interpolated_us(crossing, total_bytes * share)


def names() -> tuple[str, ...]:
    """Return the machines that can be loaded."""
    return tuple(
        sorted(entry.name.removesuffix(".json") for entry in _folder().iterdir() if entry.name.endswith(".json"))
    )


def load(name: str) -> Machine:
    """Return the machine called `name`, or the one of a file that ends in .json. Raises InputError and
    MachineFileError."""
    if name.endswith(".json"):
        try:
            data = read_bytes(Path(name), MAX_BYTES)
        except (OSError, ValueError) as error:
            found = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise InputError(f"machine {name[:200]!r}", found, "Name a file that is there") from None
        return decode(data, name)
    return _shipped(name)


def decode(data: bytes, name: str) -> Machine:
    """Return the machine of a machine file. Raises MachineFileError."""
    try:
        machine = msgspec.convert(_with_base(values_of(data, MAX_BYTES)), type=Machine)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        cure = "`overweave calibrate` writes one, and those of the package show the form"
        raise MachineFileError(
            f"machine {name[:200]}", str(error)[:300], nearest_field(str(error), Machine) or cure
        ) from None
    links = machine.links
    measured = [
        links.push.points,
        links.pull.points,
        links.all_peers.points,
        links.sm_pull.points,
        links.sm_push.points,
    ]
    measured += [link.curve.points for link in machine.topology.links]
    for points in measured + [curve.points for curve in machine.collectives]:
        sizes = [size for size, _ in points]
        if sizes != sorted(set(sizes)):
            found = f"a curve whose points are out of order: {', '.join(f'{size:g}' for size in sizes[:12])}"
            raise MachineFileError(f"machine {name[:200]}", found, "Sort the points, each size once")
    try:
        check(machine.topology, machine.gpus)
    except MachineFileError as error:
        raise MachineFileError(f"machine {name[:200]}, {error.asked}", error.found, error.cure) from None
    return machine


def _with_base(content: object) -> object:
    """Return a file's content, completed from the machine that it names as `like`."""
    if not isinstance(content, dict) or "like" not in content:
        return content
    base = str(content.pop("like"))
    if base not in names():  # two files that were `like` each other would be read forever
        raise ValueError(f"it is like {base[:80]!r}, and no machine of the package has that name")
    left_out = (*NOT_INHERITED, WITH_TILES) if "tiles" in content else NOT_INHERITED
    shared = {key: value for key, value in msgspec.to_builtins(load(base)).items() if key not in left_out}
    return _merged(_with_source(shared, base), content)


def _with_source(value: object, base: str) -> object:
    """Return a machine's numbers with sources that name this machine."""
    if isinstance(value, dict):
        return {
            key: f"as {base}: {each}" if key == "source" else _with_source(each, base) for key, each in value.items()
        }
    return [_with_source(each, base) for each in value] if isinstance(value, list | tuple) else value


def _merged(base: object, overrides: object) -> object:
    """Return `base` with overrides; records are merged field by field, but one with a source is replaced whole."""
    if isinstance(base, dict) and isinstance(overrides, dict) and "source" not in overrides:
        return base | {key: _merged(base.get(key), value) for key, value in overrides.items()}
    return overrides


def default_for(world_size: int) -> str:
    """Return the machine for predictions if none is named: H200s, on hosts of eight for more ranks."""
    return next((name for name in ("h200x4", "h200x8") if load(name).gpus >= world_size), "h200x8x2")


@lru_cache
def _shipped(name: str) -> Machine:
    if name not in names():
        raise InputError("machine", repr(name[:200]), f"Use one of {', '.join(names())}, or a file that ends in .json")
    return decode(_folder().joinpath(f"{name}.json").read_bytes(), name)


def _folder() -> Traversable:
    return files("overweave.hardware") / "machines"


def _reuse(block_m: int, block_n: int) -> float:
    """Return products per loaded operand element, which limit a tile shape's rate."""
    return block_m * block_n / (block_m + block_n)
