"""The Plan: a Schedule, the hardware that realizes it, and the table that says which tile runs when.

Every method is a Plan; the tuner chooses among Plans and nothing else in the library chooses anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from overweave.ir.dtype import FLOAT8, ITEMSIZE_BYTES, Dtype, MovedDtype
from overweave.ir.epilogue import MOST_NORM_COLS
from overweave.ir.problem import Problem
from overweave.ir.schedule import Count, Name, Put, Schedule
from overweave.ir.tile_order import TileOrder

PowerOfTwo = Annotated[int, Meta(ge=1, le=1024)]
MOST_WEIGHTS = 3  # that a tile kernel multiplies by in one launch: query, key and value

COPY_ENGINE: Final = "copy_engine"
LIBRARY: Final = "library"
TILE_KERNEL: Final = "tile_kernel"
REDUCE_KERNEL: Final = "reduce_kernel"
COPY_KERNEL: Final = "copy_kernel"
AUTHOR_KERNEL: Final = "author_kernel"
PACKED_KERNEL: Final = "packed_kernel"
Engine = Literal[
    "copy_engine", "library", "tile_kernel", "reduce_kernel", "copy_kernel", "author_kernel", "packed_kernel"
]
KERNELS = (TILE_KERNEL, REDUCE_KERNEL, COPY_KERNEL, AUTHOR_KERNEL)  # they take their tiles from a table
MESSAGE_BYTES, MESSAGE_DATA_BYTES = 16, 12  # of a packed message; the rest is its flag
MOST_PACKED_RANKS = 8  # a thread looks at the messages of all its peers at once, in registers


class MatmulConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tile shape and launch of a tile kernel. group_m: tile rows that run together, to reuse `b` in L2.

    kernel: `portable` runs on every GPU that Triton knows and under the interpreter; `hopper` needs sm_90 and numbers
    of 16 bits or fp8, and has its own warps (three groups), whatever `warps` says.
    split_n: how many rectangles of columns, side by side, a tile is made of. Tiles of the last wave may be cut into
    them, so that more SMs share that wave, and a last column of tiles has no more of them than it needs
    (split_obstacle says which tiles can be split).
    split_tiles, split_k: the last `split_tiles` tiles of a rank are dealt out along k, in `split_k` shares each
    (TileRow.shares). 0: every tile is one row.
    """

    kernel: Literal["portable", "hopper"] = "portable"
    block_m: PowerOfTwo = 128
    block_n: Annotated[int, Meta(ge=1, le=1024)] = 256
    block_k: PowerOfTwo = 64
    group_m: Count = 8
    stages: Count = 3
    warps: Count = 8
    split_n: Annotated[int, Meta(ge=1, le=5)] = 1
    split_tiles: Annotated[int, Meta(ge=0)] = 0
    split_k: Annotated[int, Meta(ge=0)] = 0

    @property
    def part_n(self) -> int:
        """Columns of the rectangles that tiles may be cut into; 0 if none may be cut."""
        return self.block_n // self.split_n if self.split_n > 1 else 0


def split_obstacle(config: MatmulConfig) -> str:
    """Why tiles cannot be split as `split_n` says; empty if they can.

    Tensors have powers of two columns: so must a tile, or the rectangles that the Hopper kernel makes it of. Those are
    the bytes of a wider one, side by side, as their rows are what a swizzle takes together: 128 bytes, or 64 where the
    tile is no multiple of 64 columns.
    """
    unit_n, rest = divmod(config.block_n, config.split_n)
    whole_n = unit_n if config.kernel == "hopper" else config.block_n
    if rest or whole_n & (whole_n - 1):
        return f"block_n={config.block_n} in {config.split_n} has no powers of two columns"
    if config.split_n == 1:
        return ""
    if unit_n < (32 if config.kernel == "hopper" and config.block_n % 64 else 64):
        return f"block_n={config.block_n} in {config.split_n} leaves less than 64 columns"
    if config.kernel == "hopper" and config.block_m < 128:
        return f"the halves of a tile of {config.block_m} rows are one consumer's each"
    return ""


def shares_obstacle(config: MatmulConfig) -> str:
    """Why a kernel's tiles cannot be dealt out along k; empty if they can."""
    if config.kernel == "hopper" and config.split_n > 3 and config.block_n > 160:
        return f"beside sums of shares, main loops for {config.split_n} widths spill registers"
    return ""


def gate_obstacle(config: MatmulConfig, dtype: Dtype) -> str:
    """Why a kernel's tiles of products of a dtype cannot be gated; empty if they can.

    The Hopper kernel makes one tile of a rectangle of each weight, which must be as wide as an accumulator is together.
    """
    if config.kernel != "hopper":
        return ""
    if config.split_n > 1 or not 64 <= config.block_n <= 128:
        return f"a gated tile has 64 or 128 columns, in one rectangle, not {config.block_n} in {config.split_n}"
    if dtype == FLOAT8 and config.block_m != 128:
        return f"beside both sums of a gated tile one step's product of fp8 has 128 rows, not {config.block_m}"
    return f"a gated tile has 128 rows or more, not {config.block_m}" if config.block_m < 128 else ""


SWIZZLE_BYTES, LEAST_STEP_BYTES = 128, 32  # of a row of shared memory; and what tensor cores multiply at once


def step_obstacle(config: MatmulConfig, dtype: Dtype) -> str:
    """Why a kernel cannot multiply numbers of a dtype in such steps of k; empty if it can.

    Rectangles of a weight stored as `[n, k]` are side by side what they are behind each other only if a swizzle's rows
    hold a step.
    """
    step_bytes = config.block_k * ITEMSIZE_BYTES[dtype]
    if config.kernel == "hopper" and step_bytes > SWIZZLE_BYTES:
        return f"steps of {config.block_k} are {step_bytes} bytes of k, and kernel hopper takes {SWIZZLE_BYTES} at most"
    if step_bytes < LEAST_STEP_BYTES:
        return (
            f"steps of {config.block_k} are {step_bytes} bytes of k, and tensor cores take {LEAST_STEP_BYTES} at once"
        )
    return ""


def narrow_width(cols: int, config: MatmulConfig) -> int:
    """TileRow.width of the tile that has the last `cols` columns of a result: as many rectangles as they need."""
    if not config.part_n or cols > config.block_n - config.part_n:
        return 0
    return -(-cols // config.part_n) * config.part_n


# So many blocks that wait beside a kernel of one tile for each block leave SMs to tiles that have none yet; more of
# them begin when its last tile is claimed.
SPINNING = 64


class ReduceConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tile shape and launch of the ordered reduction. programs: how many blocks it may hold while it waits.

    parts: in how many parts, side by side, a tile is summed, if it is of whole rows that end with a norm.
    """

    block_m: PowerOfTwo = 8
    block_n: Annotated[int, Meta(ge=1, le=MOST_NORM_COLS)] = 1024  # of a norm: a whole row
    warps: Count = 8
    programs: Count = 528
    parts: PowerOfTwo = 1


DataPath = Literal["load_store", "bulk"]
PartialSums = Literal["result", "float32"]


class CopyConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Launch of the kernel that moves chunks. programs: SMs that it takes, one program on each.

    path: by loads and stores, or by bulk copies through shared memory. block_kib: what a program has under way at a
    time, by loads and stores.
    """

    programs: Count = 16
    path: DataPath = "load_store"
    block_kib: Literal[4, 8, 16, 32, 64] = 32
    warps: Literal[4, 8, 16, 32] = 16


PackedExchange = Literal["one_shot", "two_shot", "scatter", "gather"]
PACKED_SUMS: tuple[PackedExchange, ...] = ("one_shot", "two_shot", "scatter")  # that add, and may norm rows of sums


class PackedConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Launch of the kernel whose messages carry their flag. block: messages that a program has under way at a time.

    exchange: what it does. one_shot: every rank adds everything; scatter: each adds its shard; gather: all get the
    shards of all; two_shot: each adds its shard, and all get the sums.
    """

    block: PowerOfTwo = 128
    warps: Literal[4, 8, 16] = 4
    exchange: PackedExchange = "one_shot"

    @property
    def shots(self) -> int:
        """How often each rank hears from each other."""
        return 2 if self.exchange == "two_shot" else 1


MOST_SPLITS = 8  # along k, of a matmul of few rows


class SkinnyConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tile shape and launch of the matmul of few rows (kernels/skinny.py). block_m: rows, padded to as many.

    splits: in how many shares along k each tile is multiplied. stages: steps of k under way. swapped: the weight stands
    on the left of the product, which tensor cores want to have 64 rows. early: of this kernel and the packed one, the
    later starts before the earlier ends, where the GPU can do that: it awaits results only when it needs them.
    """

    block_m: PowerOfTwo
    block_n: PowerOfTwo
    block_k: PowerOfTwo
    splits: Annotated[int, Meta(ge=1, le=MOST_SPLITS)] = 1
    stages: Count = 4
    warps: Count = 4
    swapped: bool = False
    early: bool = False


class EngineAssignment(Struct, frozen=True, forbid_unknown_fields=True):
    """The engine that runs a queue."""

    queue: Name
    engine: Engine


class Realization(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Which hardware runs each queue, and with which kernels.

    copy_engine: Puts and Gets, without SMs. library: torch and NCCL calls on the caller's stream, in order.
    tile_kernel: all Computes of the queue in one launch. reduce_kernel: all Reduces of the queue in one launch.
    copy_kernel: all Puts of the queue in one launch, on the SMs that `copy` names.
    author_kernel: all Applies of the queue in one launch of a kernel that the compiler made from its author's; and its
    Puts, which the programs carry between their tiles, on the path that `slices` names.
    packed_kernel: all operations of the queue in one launch, without a head of the call before it: each program does
    its part of every Put, Reduce and Copy in turn, message by message as flags tell.
    skinny: our matmul of few rows, which then computes in the library's place what a library queue multiplies.
    library_sms: SMs that the tile kernel leaves to library calls on streams of their own. With none, such a call starts
    when tiles leave SMs idle, so no tile may wait for it.
    partial_sums: the dtype of sums that are added to again. result: sums may be rounded to that of their buffer in
    between, as those that travel round a ring are; float32: no sum of fewer bits is added to.
    """

    dtype: Dtype
    engines: tuple[EngineAssignment, ...]
    matmul: MatmulConfig | None = None
    reduction: ReduceConfig | None = None
    copy: CopyConfig | None = None
    slices: DataPath = "load_store"
    packed: PackedConfig | None = None
    skinny: SkinnyConfig | None = None
    library_sms: Annotated[int, Meta(ge=0)] = 0
    partial_sums: PartialSums = "float32"

    @cached_property
    def engine_by_queue(self) -> Mapping[str, Engine]:
        """The engines of all queues that have one."""
        return {assignment.queue: assignment.engine for assignment in reversed(self.engines)}

    def engine_of(self, queue: str) -> Engine:
        """The engine of a queue. Raises KeyError."""
        return self.engine_by_queue[queue]


# Tensors beside `x` and `w` of a call whose factors lie in two parts: further columns of x, and as many rows of w.
X_REST, W_REST = "x_rest", "w_rest"


def numbered(name: str, index: int) -> str:
    """The buffer of a further weight, or of its product: `w`, `w.1`, `w.2`, ..."""
    return f"{name}.{index}" if index else name


class Plan(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that decides how one call runs. `tile_orders`: one per rank and kernel queue."""

    name: Name
    problem: Problem
    schedule: Schedule
    realization: Realization
    tile_orders: tuple[TileOrder, ...] = ()

    def dtype_of(self, buffer: str) -> MovedDtype:
        """Of the numbers in a buffer of the schedule. Raises KeyError."""
        return self.schedule.buffer(buffer).dtype or self.realization.dtype

    @property
    def sms_for_pushes(self) -> int:
        """SMs that the tile kernel leaves to pushes beside it: those of a copy kernel that waits for its tiles, and
        that no kernel boundary precedes. Pushes that wait for nothing have their SMs before it starts.
        """
        copy, after = self.realization.copy, {queue.name: queue.after for queue in self.schedule.queues}
        beside = {
            one.queue for one in self.realization.engines if one.engine == COPY_KERNEL and not after.get(one.queue)
        }
        waits = any(isinstance(each, Put) and each.queue in beside and each.waits for each in self.schedule.operations)
        return copy.programs if copy and waits else 0

    @property
    def sms_beside(self) -> int:
        """SMs that the tile kernel leaves free: to pushes, and to library calls."""
        return self.sms_for_pushes + self.realization.library_sms

    def tile_order(self, rank: int, queue: str) -> TileOrder:
        """The table of a rank's kernel queue. Raises KeyError."""
        for order in self.tile_orders:
            if order.rank == rank and order.queue == queue:
                return order
        raise KeyError((rank, queue))
