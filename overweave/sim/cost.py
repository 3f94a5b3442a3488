"""Microseconds of a tile, a library matmul, a copy, a collective and a reduction, each alone on a described machine.

What one thing costs beside another is decided by the run (simulate.py). Not modelled: host time (calls are launched
ahead of the GPU), clocks that rise when SMs idle or fall with power, L2 hits and misses, differences between SMs.
SOURCE: the wave model of FlashOverlap, section 4; decomposition loss as in FiCCO, section IV-C.
"""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from overweave.hardware.machine import Curve, Machine, TileRate
from overweave.ir.dtype import ITEMSIZE_BYTES, Dtype
from overweave.ir.plan import MESSAGE_BYTES, MESSAGE_DATA_BYTES, MatmulConfig, Realization, numbered
from overweave.ir.schedule import Apply, Clear, Collective, Compute, Copy, Get, Put, Reduce, Region, Schedule
from overweave.sim.few_rows import saved_us

Move = Put | Get | Copy | Clear  # and a ReducePut, which is a Put
Dtypes = tuple[Dtype, Dtype]  # of a matmul's operands, and of its result
FP32_BYTES = ITEMSIZE_BYTES["float32"]
# A tile reads several addends strip by strip, each strip when the one before is stored: slower than its SM's share.
# MEASURED: fitted to the 18 rows of sums=epilogue in benchmarks/results/plans.matmul_reduce_scatter.h200x4.2026-11-20,
# three addends a tile: their mean error is 1.5 % with it and 5.0 % without, where the reduction kernel's is 0.4 %.
STRIPS_SLOWER = 2.5


class Work(Struct, frozen=True):
    """What a kernel has to do for one operation: `count` equal tiles of `tile_us` on one SM each."""

    count: int
    tile_us: float


class Segment(Struct, frozen=True):
    """One copy between two ranks (or within one): how long it takes alone."""

    source: int
    target: int
    alone_us: float


def tiles_of(rows: int, cols: int, block_m: int, block_n: int) -> int:
    return -(-rows // block_m) * -(-cols // block_n)


def tile_us(machine: Machine, rate: TileRate, shape: tuple[int, int, int], dtype: Dtype) -> float:
    """One tile `[block_m, block_n]` over `k`, every SM busy. A ragged tile costs as much as a full one."""
    block_m, block_n, k = shape
    per_sm = rate.tflops * machine.dtype_share(dtype) * 1e6 / machine.processor.sms
    return 2.0 * block_m * block_n * k / per_sm + rate.overhead_us


def kernel_work(machine: Machine, operation: Compute, config: MatmulConfig, dtypes: Dtypes, count: int) -> Work:
    """The tiles of one Compute in a tile kernel: no faster than its operands come from memory."""
    rows, cols, k = matmul_shape(operation)
    rate = machine.tile(config.kernel, config.block_m, config.block_n)
    alone = tile_us(machine, rate, (config.block_m, config.block_n, k), dtypes[0])
    return Work(count, max(alone, _memory_tile_us(machine, (rows, cols, k), dtypes, count)))


def as_multiplied(operation: Compute, products: int) -> Compute:
    """A gate's product beside that of a tile: a Compute of so many columns more."""
    lo, hi = operation.b.cols
    return replace(operation, b=replace(operation.b, cols=(lo, lo + (hi - lo) * products)))


def addends_us(machine: Machine, operation: Compute, config: MatmulConfig | None, dtype: Dtype, count: int) -> float:
    """What one of `count` tiles takes to add its addends to its product: to look for them, and to read them, each SM
    with its share of HBM, or of a link where they lie on peers. 0 without addends.

    The Hopper kernel reads a single addend while it multiplies, unless it comes later (kernels/hopper/received.py).
    """
    if not operation.addends:
        return 0.0
    if config and config.kernel == "hopper" and [addend.rank for addend in operation.addends] == [operation.rank]:
        return machine.latency.observe.us
    own = sum(size(region) for region in operation.addends if region.rank == operation.rank)
    far = sum(size(region) for region in operation.addends) - own
    sms, item = machine.processor.sms, ITEMSIZE_BYTES[dtype] / max(count, 1)
    from_hbm, from_peers = machine.hbm.gb_per_s / sms, machine.links.sm_pull.gb_per_s(sms) / sms
    return machine.latency.observe.us + item * (STRIPS_SLOWER * own / from_hbm + far / from_peers) / 1e3


def parts_of_tile(
    machine: Machine, schedule: Schedule, operation: Compute, how: tuple[MatmulConfig | None, Dtype, Work]
) -> tuple[float, float, float]:
    """How long a tile has its SM until its product is there, and with what it adds behind that; and how long it takes
    then until it is stored, if it is at peers, while its SM computes the next one.
    """
    config, dtype, tile = how
    added_us = addends_us(machine, operation, config, dtype, tile.count)
    stored_us = stores_us(machine, operation, dtype, tile, _stored_alike(schedule, operation))
    return max(tile.tile_us, stored_us), added_us, min(tile.tile_us, stored_us)


def _stored_alike(schedule: Schedule, operation: Compute) -> int:
    """How many tiles of its rank are stored as an operation's are, at one peer or everywhere, by turns or at once."""
    if operation.stored_at == {operation.rank}:
        return operation.tiles
    others = (one for one in schedule.of_rank(operation.rank) if isinstance(one, Compute))
    return sum(one.tiles for one in others if one.stored_at - {one.rank} and bool(one.copies) == bool(operation.copies))


def stores_us(machine: Machine, operation: Compute, dtype: Dtype, tile: Work, alike: int) -> float:
    """Of a tile that is stored at peers, as `alike` tiles of its rank are: by all SMs together, at the link's rate."""
    if operation.stored_at == {operation.rank}:
        return 0.0
    links, sms = machine.links.sm_push, min(machine.processor.sms, max(alike, 1))
    sent = sum(size(part) for part in operation.copies or operation.out) * ITEMSIZE_BYTES[dtype] / max(tile.count, 1)
    return sent / 1e3 * sms / links.gb_per_s(sms)


def before_and_behind_last_part(operation: Apply, tile_us: float) -> tuple[float, float]:
    """What of an author's tile, which reads some things part by part, is over before the last part is needed.

    Parts are taken for equal. A tile that meets a missing part earlier waits there; the last one is what it ends by.
    """
    behind_us = tile_us / max(1, len(operation.late_waits))
    return tile_us - behind_us, behind_us


def library_work(machine: Machine, operation: Compute, dtypes: Dtypes, how: Realization | None = None) -> Work:
    """A library matmul: its tiles have the shape that finishes first by whole waves. how: if our matmul of few rows
    computes in its place, what that saves is left out."""
    shape = matmul_shape(operation)
    work = _library_work(machine, shape, dtypes)
    is_first = operation.b.buffer == numbered(operation.b.buffer.partition(".")[0], 0)  # of several: one is measured
    if how is None or how.skinny is None or not work.count or not is_first:
        return work
    waves = -(-work.count // machine.processor.sms)
    return Work(work.count, max(0.0, work.tile_us - saved_us(how, *shape) / waves))


def library_matmul_us(machine: Machine, shape: tuple[int, int, int], dtype: Dtype) -> float:
    """A library matmul `(m, n, k)` alone, as a call is timed."""
    work = _library_work(machine, shape, (dtype, dtype))
    waves = -(-work.count // machine.processor.sms)
    return machine.latency.call.us + machine.latency.kernel.us + waves * work.tile_us


@lru_cache(maxsize=4096)
def _library_work(machine: Machine, shape: tuple[int, int, int], dtypes: Dtypes) -> Work:
    rows, cols, k = shape
    best, best_us = Work(0, 0.0), float("inf")
    for rate in machine.tiles_of("library"):
        count = tiles_of(rows, cols, rate.block_m, rate.block_n)
        each = tile_us(machine, rate, (rate.block_m, rate.block_n, k), dtypes[0])
        each = max(each, _memory_tile_us(machine, shape, dtypes, count))
        total = -(-count // machine.processor.sms) * each
        if total < best_us:
            best, best_us = Work(count, each), total
    return best


def reduce_work(machine: Machine, operation: Reduce, dtype: Dtype, counts: tuple[int, int]) -> Work:
    """The tiles of an ordered sum: each SM has its share of HBM for own bytes, and of what so many SMs can pull.

    counts: its tiles, and those of its kernel, which share the link with it, whatever they sum.
    """
    item, (count, beside) = ITEMSIZE_BYTES[dtype], counts
    own = size(operation.out) + sum(size(region) for region in operation.operands if region.rank == operation.rank)
    far = sum(size(region) for region in operation.operands if region.rank != operation.rank)
    sms = machine.processor.sms
    programs = min(sms, max(beside, 1))
    from_hbm, from_peers = machine.hbm.gb_per_s / sms, machine.links.sm_pull.gb_per_s(programs) / programs
    moving = item / max(count, 1) * (own / from_hbm + far / from_peers) / 1e3
    return Work(count, moving + machine.latency.reduce_tile.us)


def push_work(machine: Machine, operation: Move, programs: int, dtype: Dtype, count: int) -> Work:
    """`count` tiles of a push by a kernel on so many SMs: each has its share of what these reach together."""
    moved = sum(size(region) for region in operation.sources) * ITEMSIZE_BYTES[dtype] / max(count, 1)
    per_sm = machine.links.sm_push.gb_per_s(programs) / programs
    return Work(count, moved / per_sm / 1e3 + machine.latency.copy_tile.us)


def packed_us(machine: Machine, operation: Put | Reduce | Copy, peers: int, dtype: Dtype) -> float:
    """A push in messages that carry their flag, which shares the port with those to the other peers; the launch and the
    read of the product included, unless what it sends is still in registers. Or what waits for messages: a look more
    when a sum's last one is there. A thread adds, sends on and stores its message while others still arrive.

    MEASURED: beyond the matmul 3.5 to 36 us for 8 KiB to 8 MiB (2 x H200, captured calls,
    benchmarks/results/packed.h200x2.2026-11-22.txt). With that both shots are predicted within 1.6 us in all 20 rows of
    the file; to charge memory for the sums as well missed by 6 us at 8 MiB.
    """
    if isinstance(operation, Reduce):
        return machine.latency.observe.us
    if isinstance(operation, Copy):
        return 0.0
    share = MESSAGE_BYTES / MESSAGE_DATA_BYTES * ITEMSIZE_BYTES[dtype]
    carried = sum(size(region) for region in operation.sources)
    moving = peers * share * carried / machine.links.sm_push.gb_per_s(machine.processor.sms) / 1e3
    begun = 0.0 if operation.waits else machine.latency.kernel.us + machine.latency.copy_tile.us
    return begun + moving


def library_sum_works(machine: Machine, operation: Reduce, dtype: Dtype) -> tuple[Work, ...]:
    """The library's ordered sum, one kernel after the other (runtime/library/library.py): widen the first operand to
    fp32, add each further one to that, narrow the total. Each reads and writes memory once, one program per SM.
    """
    elements, item = size(operation.out), ITEMSIZE_BYTES[dtype]
    if not elements:
        return ()
    passes = machine.element_wise
    widen = (item + FP32_BYTES) / passes.widen.gb_per_s
    add = (FP32_BYTES + item + FP32_BYTES) / passes.add.gb_per_s
    narrow = (FP32_BYTES + item) / passes.narrow.gb_per_s
    programs = min(machine.processor.sms, elements)
    element_ns = (widen, *(add for _ in operation.operands[1:]), narrow)
    return tuple(Work(programs, elements * each / 1e3) for each in element_ns)


def local_copy_work(machine: Machine, operation: Move, dtype: Dtype) -> Work:
    """A copy within a rank, or zeros: a kernel that reads and writes its own memory, one program per SM."""
    elements = sum(size(region) for region in operation.destinations)
    touched = elements + sum(size(region) for region in operation.sources)
    moving = touched * ITEMSIZE_BYTES[dtype] / machine.hbm.gb_per_s / 1e3
    return Work(min(machine.processor.sms, elements), moving)


def segments(machine: Machine, schedule: Schedule, operation: Move, dtype: Dtype) -> tuple[Segment, ...]:
    """The copies of one Put or Get, in order. Empty ones are left out."""
    curve = machine.links.pull if isinstance(operation, Get) else machine.links.push
    found = []
    for source, target in zip(operation.sources, operation.destinations, strict=True):
        if not source.is_empty:
            found.append(_segment(machine, schedule, curve, source, target, dtype))
    return tuple(found)


def collective_us(machine: Machine, parts: list[Collective], dtype: Dtype) -> float:
    """One library collective over the ranks of its parts, once all have arrived."""
    regions = parts[0].destinations if parts[0].function == "all_gather" else parts[0].sources
    total = sum(size(region) for region in regions) * ITEMSIZE_BYTES[dtype]
    if not total:
        return 0.0
    # As much leaves a rank in an all-to-all of so many bytes as in an all-gather of as many: so its rate is taken.
    function = "all_gather" if parts[0].function == "all_to_all" else parts[0].function
    return max(0.0, machine.collective_us(function, len(parts), total) - machine.latency.call.us)


def matmul_shape(operation: Compute) -> tuple[int, int, int]:
    """(rows, cols, k) of one Compute."""
    rows = sum(region.shape[0] for region in operation.a)
    return rows, operation.b.shape[1], operation.b.shape[0]


def size(region: Region) -> int:
    """Elements of a region."""
    return 0 if region.is_empty else region.shape[0] * region.shape[1]


def moves_between_ranks(operation: Move) -> bool:
    """Whether the operation's bytes cross a link."""
    return any(
        source.rank != target.rank for source, target in zip(operation.sources, operation.destinations, strict=True)
    )


def _segment(
    machine: Machine, schedule: Schedule, curve: Curve, source: Region, target: Region, dtype: Dtype
) -> Segment:
    size_bytes = size(source) * ITEMSIZE_BYTES[dtype]
    alone = curve.time_us(size_bytes)
    if source.rank == target.rank:
        alone = 2 * size_bytes / machine.hbm.gb_per_s / 1e3
    elif not (_is_contiguous(schedule, source) and _is_contiguous(schedule, target)):
        alone *= machine.links.strided.factor
    return Segment(source.rank, target.rank, alone)


def _is_contiguous(schedule: Schedule, region: Region) -> bool:
    return region.shape[0] == 1 or region.shape[1] == schedule.buffer(region.buffer).cols


def _memory_tile_us(machine: Machine, shape: tuple[int, int, int], dtypes: Dtypes, count: int) -> float:
    """Time of a tile if its operation were bound by memory: each operand element is read, each result written once."""
    rows, cols, k = shape
    item, out_item = (ITEMSIZE_BYTES[dtype] for dtype in dtypes)
    moved = (rows * k + k * cols) * item + rows * cols * out_item
    waves = -(-count // machine.processor.sms)
    return moved / machine.hbm.gb_per_s / 1e3 / max(waves, 1)
