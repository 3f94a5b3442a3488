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
MOST_WEIGHTS = 3  # of one launch of a tile kernel: query, key and value

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
KERNELS = (TILE_KERNEL, REDUCE_KERNEL, COPY_KERNEL, AUTHOR_KERNEL)  # they claim tiles from a table
MESSAGE_BYTES, MESSAGE_DATA_BYTES = 16, 12  # of a packed message; the rest is its flag
MOST_PACKED_RANKS = 8  # a thread polls the messages of all its peers together, in registers


class MatmulConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tile shape and launch of a tile kernel. group_m: tile rows that run together, to reuse `b` in L2.

    kernel: `portable` runs on every GPU that Triton knows and under the interpreter; `hopper` needs sm_90 and elements
    of 16 bits or fp8, and has its own warps (three groups), whatever `warps` says.
    split_n: how many TMA boxes of columns, side by side, make up a tile. Tiles of the last wave may be cut into these
    boxes, so that more SMs share that wave, and a last column of tiles has only as many boxes as it needs
    (`split_obstacle` says which tiles can be split).
    """

    kernel: Literal["portable", "hopper"] = "portable"
    block_m: PowerOfTwo = 128
    block_n: Annotated[int, Meta(ge=1, le=1024)] = 256
    block_k: PowerOfTwo = 64
    group_m: Count = 8
    stages: Count = 3
    warps: Count = 8
    split_n: Annotated[int, Meta(ge=1, le=5)] = 1

    @property
    def part_n(self) -> int:
        """Return the columns of the boxes that tiles may be cut into; 0 if tiles may not be cut."""
        return self.block_n // self.split_n if self.split_n > 1 else 0


def split_obstacle(config: MatmulConfig) -> str:
    """Return why tiles cannot be made of `split_n` boxes; "" if they can.

    Triton's tensors have powers of two columns: so must a tile, or the boxes that the Hopper kernel makes it of. The
    boxes of a tile hold the bytes of a wider one, side by side, since a swizzle takes 128 bytes of their rows together,
    or 64 where the tile is not a multiple of 64 columns.
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


def gate_obstacle(config: MatmulConfig, dtype: Dtype) -> str:
    """Return why a kernel cannot compute gated tiles of products of a dtype; "" if it can. The Hopper kernel makes one
    tile of a box of each weight; both boxes together are one accumulator wide."""
    if config.kernel != "hopper":
        return ""
    if config.split_n > 1 or not 64 <= config.block_n <= 128:
        return f"a gated tile has 64 or 128 columns, in one rectangle, not {config.block_n} in {config.split_n}"
    if dtype == FLOAT8 and config.block_m != 128:
        return f"beside both sums of a gated tile one step's product of fp8 has 128 rows, not {config.block_m}"
    return f"a gated tile has 128 rows or more, not {config.block_m}" if config.block_m < 128 else ""


SWIZZLE_BYTES, LEAST_STEP_BYTES = 128, 32  # of a row of shared memory; of k in one MMA instruction


def step_obstacle(config: MatmulConfig, dtype: Dtype) -> str:
    """Return why a kernel cannot multiply elements of a dtype in steps of `block_k`; "" if it can. Boxes of a weight
    stored as `[n, k]` lie side by side as if behind each other only if a swizzle's rows hold a step."""
    step_bytes = config.block_k * ITEMSIZE_BYTES[dtype]
    if config.kernel == "hopper" and step_bytes > SWIZZLE_BYTES:
        return f"steps of {config.block_k} are {step_bytes} bytes of k, and kernel hopper takes {SWIZZLE_BYTES} at most"
    if step_bytes < LEAST_STEP_BYTES:
        return (
            f"steps of {config.block_k} are {step_bytes} bytes of k, and tensor cores take {LEAST_STEP_BYTES} at once"
        )
    return ""


def narrow_width(cols: int, config: MatmulConfig) -> int:
    """Return TileRow.width of the tile with the last `cols` columns of a result: a multiple of `part_n`; 0: whole."""
    if not config.part_n or cols > config.block_n - config.part_n:
        return 0
    return -(-cols // config.part_n) * config.part_n


# Blocks of a reduction that spin beside a matmul with one tile for each block: so few leave SMs to unclaimed tiles.
# More of them begin when the last tile is claimed.
SPINNING = 64


class ReduceConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tile shape and launch of the ordered reduction. programs: how many blocks may be resident while they wait. parts:
    in how many parts, side by side, a tile is summed, if it is of whole rows and ends in RMSNorm."""

    block_m: PowerOfTwo = 8
    block_n: Annotated[int, Meta(ge=1, le=MOST_NORM_COLS)] = 1024  # of a norm: a whole row
    warps: Count = 8
    programs: Count = 528
    parts: PowerOfTwo = 1


DataPath = Literal["load_store", "bulk"]
PartialSums = Literal["result", "float32"]


class CopyConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Launch of the kernel that moves chunks. programs: one program on each SM that it takes.

    path: by loads and stores, or by bulk copies (TMA) through shared memory. block_kib: bytes in flight of one program,
    by loads and stores.
    """

    programs: Count = 16
    path: DataPath = "load_store"
    block_kib: Literal[4, 8, 16, 32, 64] = 32
    warps: Literal[4, 8, 16, 32] = 16


PackedExchange = Literal["one_shot", "two_shot", "scatter", "gather"]
PACKED_SUMS: tuple[PackedExchange, ...] = ("one_shot", "two_shot", "scatter")  # that add, and may norm rows of sums


class PackedConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Launch of the kernel for LL-protocol messages, which carry their flag. block: messages in flight of one program.

    exchange: one_shot: every rank adds everything; scatter: each adds its shard; gather: all get the shards of all;
    two_shot: each adds its shard, and all get the sums.
    """

    block: PowerOfTwo = 128
    warps: Literal[4, 8, 16] = 4
    exchange: PackedExchange = "one_shot"

    @property
    def shots(self) -> int:
        return 2 if self.exchange == "two_shot" else 1


MOST_SPLITS = 8  # along k, of a matmul of few rows


class SkinnyConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tile shape and launch of the matmul of few rows (kernels/skinny.py). block_m: rows, padded to as many.

    splits: split-K shares of each tile. stages: steps of k in flight. swapped: the weight is the left factor, since
    tensor cores want that to have 64 rows. early: programmatic dependent launch: of this kernel and the packed one, the
    second starts before the first ends, if the GPU can do that, and waits for results only where it needs them.
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
    """Which engine runs each queue, and with which kernels.

    copy_engine: Puts and Gets, without SMs.
    library: torch and NCCL calls on the caller's stream, in order.
    tile_kernel: all Computes of the queue in one launch.
    reduce_kernel: all Reduces of the queue in one launch.
    copy_kernel: all Puts of the queue in one launch, on the SMs that `copy` names.
    author_kernel: all Applies of the queue in one launch of the kernel that the compiler made of its author's; and its
    Puts, which the programs push between their tiles, on the path that `slices` names.
    packed_kernel: all operations of the queue in one launch, without the call's prologue before it: each program does
    its part of every Put, Reduce and Copy in turn, message by message as flags arrive.
    skinny: our matmul of few rows, which then computes the products of a library queue in the place of cuBLAS.
    library_sms: SMs that the tile kernel leaves to library calls on side streams. With none, such a call starts when
    tiles leave SMs idle, so no tile may wait for it.
    partial_sums: the dtype of sums that are added to again.
    result: such sums may be rounded to the dtype of their buffer, as those that travel round a ring are; float32: no
    sum of fewer bits is added to.
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
        """Return queue -> engine, of all queues that have one."""
        return {assignment.queue: assignment.engine for assignment in reversed(self.engines)}

    def engine_of(self, queue: str) -> Engine:
        return self.engine_by_queue[queue]


# Names of the second parts of a call's factors, if these lie in two: further columns of x, and as many rows of w.
X_REST, W_REST = "x_rest", "w_rest"


def indexed_name(name: str, index: int) -> str:
    """Return the buffer of a further weight, or of its product: `w`, `w.1`, `w.2`, ..."""
    return f"{name}.{index}" if index else name


class Plan(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that decides how one call runs. `tile_orders`: one per rank and kernel queue."""

    name: Name
    problem: Problem
    schedule: Schedule
    realization: Realization
    tile_orders: tuple[TileOrder, ...] = ()

    def dtype_of(self, buffer: str) -> MovedDtype:
        """Return the dtype of a buffer of the schedule. Raises KeyError."""
        return self.schedule.buffer(buffer).dtype or self.realization.dtype

    @property
    def sms_for_pushes(self) -> int:
        """Return how many SMs the tile kernel leaves to a copy kernel beside it whose pushes wait for its tiles. A copy
        kernel that waits for nothing has its SMs before the tile kernel starts."""
        copy, after = self.realization.copy, {queue.name: queue.after for queue in self.schedule.queues}
        copy_queues = {
            one.queue for one in self.realization.engines if one.engine == COPY_KERNEL and not after.get(one.queue)
        }
        puts = (each for each in self.schedule.operations if isinstance(each, Put) and each.queue in copy_queues)
        return copy.programs if copy and any(put.waits for put in puts) else 0

    @property
    def sms_beside(self) -> int:
        """Return how many SMs the tile kernel leaves free: to pushes, and to library calls."""
        return self.sms_for_pushes + self.realization.library_sms

    def tile_order(self, rank: int, queue: str) -> TileOrder:
        """Return the table of a rank's kernel queue. Raises KeyError."""
        for order in self.tile_orders:
            if order.rank == rank and order.queue == queue:
                return order
        raise KeyError((rank, queue))


# Limits and units of the kernels that move data and signals.


MOST_PEERS = 7  # where tiles of one kernel store: it has arguments for so many tensor maps
LEAST_WAVES = 1.5  # of a shard's tiles: from here on a second wave is computed while the first travels
INT32_BYTES = 4  # the unit of addresses of signals and messages
COPY_WORD_BYTES = 16  # what a thread loads and stores at once; rows are multiples of it
# Signals have this fixed space under every plan, so that data of one plan is never read as a signal of the next.
SIGNAL_CAPACITY = 4096
