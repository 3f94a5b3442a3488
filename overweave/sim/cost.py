"""Microseconds of a tile, a library matmul, a copy, a collective and a reduction, each alone on a described machine.

What one thing costs beside another is decided by the run (simulate.py). Not modelled: host time (calls are launched
ahead of the GPU), clocks that rise when SMs idle or fall with power, L2 hits and misses, differences between SMs.
SOURCE: the wave model of FlashOverlap, section 4; decomposition loss as in FiCCO, section IV-C.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from math import inf

from msgspec import Struct

from overweave.errors import ScheduleError
from overweave.hardware.machine import Machine, TileRate
from overweave.ir.dtype import ITEMSIZE_BYTES, Dtype, MovedDtype
from overweave.ir.plan import AUTHOR_KERNEL, MESSAGE_BYTES, MESSAGE_DATA_BYTES, MatmulConfig, Plan, numbered
from overweave.ir.schedule import Apply, Clear, Collective, Compute, Copy, Get, Operation, Put, Reduce, Region
from overweave.sim.order import LaunchStep, QueueRun, tiles_of
from overweave.sim.shares import sum_us, to_share_us

PricedMove = Put | Get | Copy | Clear  # and a ReducePut, which is a Put
MatmulShape = tuple[int, int, int]  # rows, columns, k
Dtypes = tuple[Dtype, MovedDtype]  # of a matmul's operands, and of its result
FP32_BYTES = ITEMSIZE_BYTES["float32"]
# A tile reads several addends strip by strip, each strip when the one before is stored: slower than its SM's share.
# MEASURED: fitted to the 18 rows of sums=epilogue in benchmarks/results/plans.matmul_reduce_scatter.h200x4.2026-11-20,
# three addends a tile: their mean error is 1.5 % with it and 5.0 % without, where the reduction kernel's is 0.4 %.
STRIPS_SLOWER = 2.5


class KernelCost(Struct, frozen=True):
    """What a kernel has to do for one operation: `count` equal tiles, each `tile_us` on an SM of its own.

    late_us: of a tile, behind what it waits for when its product is there. stored_us: how long the stores of a tile to
    peers take beyond that, while its SM computes the next tile.
    """

    count: int
    tile_us: float
    late_us: float = 0.0
    stored_us: float = 0.0


class Segment(Struct, frozen=True):
    """One copy between two ranks (or within one): how long it takes alone."""

    source: int
    target: int
    alone_us: float


class Costs:
    """What each operation of a plan costs alone on a machine. author_tile_us: one tile of an author's kernel."""

    def __init__(self, plan: Plan, machine: Machine, author_tile_us: float | None = None) -> None:
        self._name, self._realization, self._machine = plan.name, plan.realization, machine
        self._author_tile_us = author_tile_us
        self._moves: dict[tuple[int, int, int, bool, bool], Segment] = {}
        self._buffers = {buffer.name: buffer for buffer in plan.schedule.buffers}
        self._problem, self._products = plan.problem, plan.problem.epilogue.products  # that each tile computes
        computes = [each for each in plan.schedule.operations if isinstance(each, Compute)]
        self._stored_alike: Counter[tuple[int, bool]] = Counter()  # tiles of a rank stored at one peer, or everywhere
        for each in computes:
            if each.stored_at - {each.rank}:
                self._stored_alike[each.rank, bool(each.copies)] += each.tiles

    def tiles(self, step: LaunchStep, run: QueueRun, count: int, beside: int) -> KernelCost:
        """A kernel's tiles of one run. count: the tiles of its operation; beside: those of its launch.

        Raises ScheduleError where the realization has no config for them, or nobody says how long an author's take.
        """
        copy, sms = self._realization.copy, self._machine.processor.sms
        match step.operation:
            case Reduce() as operation:
                return self._reduced(operation, count, beside)
            case Put() as operation if step.engine == AUTHOR_KERNEL:
                return self._pushed(operation, sms, count)
            case (Put() | Copy()) as operation if copy is not None:
                return self._pushed(operation, min(copy.programs, sms), count)
            case Compute() as operation if self._realization.matmul is not None:
                return self._multiplied(operation, self._realization.matmul, run, count)
            case Apply() as operation if self._author_tile_us is not None:
                # Parts are taken for equal. A tile that meets a missing part earlier waits there; the last part is
                # what it ends by.
                behind_us = self._author_tile_us / len(operation.late_waits) if operation.late_waits else 0.0
                return KernelCost(count, self._author_tile_us - behind_us, behind_us)
        found, cure = "its queue has an engine that cannot run it", "Name another engine in the realization"
        if isinstance(step.operation, Compute):
            found, cure = "the realization has no matmul config", "Give it one, or take a plan of the catalog"
        if isinstance(step.operation, Apply):
            found = "nobody knows how long a tile of a compiled kernel takes"
            cure = "Give the time, as `overweave simulate --tile-us 10` does"
        raise ScheduleError(f"time of {step.operation.name}", found, cure)

    def alone(self, operation: Operation) -> tuple[KernelCost, ...]:
        """What a stream runs: kernels of the operation's own, one after the other."""
        match operation:
            case Compute():
                return (self._by_library(operation),)
            case Reduce():
                return self._summed_by_library(operation)
            case Put() | Get() | Copy() | Clear():
                return (self._moved_within(operation),)
        return ()

    def _multiplied(self, operation: Compute, config: MatmulConfig, run: QueueRun, count: int) -> KernelCost:
        """No faster than its operands come from memory, nor, of tiles stored at peers, than the link takes them."""
        block_m, block_n = config.block_m, (run.width or config.block_n) * self._products
        shape, machine = self._shape(operation), self._machine
        rate = machine.tile(config.kernel, block_m, block_n)
        alone_us = tile_us(machine, rate, (block_m, block_n, shape[2]), self._realization.dtype)
        beside = 0 if operation.addends else self._beside(self._problem.of_products.reads_rows, operation.out)
        us = max(alone_us, _memory_tile_us(machine, *self._read_together(operation, shape), beside=beside))
        if run.depth:  # in the mean, a share adds one
            us = to_share_us(us, run.depth / shape[2], config) + sum_us(1, config)
        stored_us = self._stores_us(operation, count)
        return KernelCost(count, max(us, stored_us), self._addends_us(operation, config, count), min(us, stored_us))

    def _read_together(self, operation: Compute, shape: MatmulShape) -> tuple[MatmulShape, Dtypes, int]:
        """What tiles read and store that run together: those of the operation, or, where it is a few blocks of a
        product, those of the whole product, whose rows and columns they share.
        """
        buffer, dtypes = self._buffers[operation.out[0].buffer], self._dtypes(operation)
        if buffer.blocks is None:
            return shape, dtypes, operation.tiles
        return (buffer.rows, buffer.cols, shape[2]), dtypes, len(buffer.blocks.places)

    def _addends_us(self, operation: Compute, config: MatmulConfig, count: int) -> float:
        """What one of `count` tiles takes to add its addends to its product: to look for them, and to read them, each
        SM with its share of HBM, or of a link where they lie on peers.

        The Hopper kernel reads a single addend while it multiplies, unless it comes later (kernels/hopper/received.py).
        """
        machine = self._machine
        if not operation.addends:
            return 0.0
        if config.kernel == "hopper" and [addend.rank for addend in operation.addends] == [operation.rank]:
            return machine.latency.observe.us
        own, far = self._near_and_far(operation, operation.addends)
        own += self._beside(operation.finishes, operation.out)
        sms = machine.processor.sms
        from_hbm, from_peers = machine.hbm.gb_per_s / sms, self._pulled(operation, operation.addends, sms) / sms
        read_us = (STRIPS_SLOWER * own / from_hbm + far / from_peers) / max(count, 1) / 1e3
        return machine.latency.observe.us + read_us

    def _stores_us(self, operation: Compute, count: int) -> float:
        """Of one of `count` tiles that is stored at peers: by all SMs that store so together, at the link's rate."""
        if operation.stored_at == {operation.rank}:
            return 0.0
        alike = self._stored_alike[operation.rank, bool(operation.copies)]
        sms, stored = min(self._machine.processor.sms, max(alike, 1)), operation.copies or operation.out
        sent = self._bytes(operation, stored) / max(count, 1)
        return sent / 1e3 * sms / self._sent(operation, stored, sms)

    def _by_library(self, operation: Compute) -> KernelCost:
        """A library matmul, less what our matmul of few rows saves where it computes in its place."""
        shape, how = self._shape(operation), self._realization
        work = _library_work(self._machine, shape, self._dtypes(operation), operation.accumulate)
        first = numbered(operation.b.buffer.partition(".")[0], 0)  # of several weights, one is measured
        if how.skinny is None or how.packed is None or not work.count or operation.b.buffer != first:
            return work
        kind = "gather" if how.packed.exchange == "gather" else "sum", how.skinny.early
        known = [each for each in self._machine.few_rows if (each.exchange, each.early) == kind]
        waves = -(-work.count // self._machine.processor.sms)
        saved_us = sum(each.saved_us(*shape) for each in known) / waves
        return KernelCost(work.count, max(0.0, work.tile_us - saved_us))

    def _reduced(self, operation: Reduce, count: int, beside: int) -> KernelCost:
        """The tiles of an ordered sum: each SM has its share of HBM for own bytes, and of what so many SMs can pull.

        beside: the tiles of its kernel, which share the link with it, whatever they sum.
        """
        machine, sms = self._machine, self._machine.processor.sms
        near, far = self._near_and_far(operation, operation.operands)
        own, programs = near + self._bytes(operation, operation.writes), min(sms, max(beside, 1))
        own += self._beside(operation.finishes, (operation.out,))
        from_hbm = machine.hbm.gb_per_s / sms
        from_peers = self._pulled(operation, operation.operands, programs) / programs
        moving_us = (own / from_hbm + far / from_peers) / max(count, 1) / 1e3
        return KernelCost(count, moving_us + machine.latency.reduce_tile.us)

    def _beside(self, is_read: bool, regions: Iterable[Region]) -> int:
        """Bytes that the epilogue reads beside elements of the result."""
        return sum(self._problem.bytes_beside(*region.shape) for region in regions) if is_read else 0

    def _pushed(self, operation: Put | Copy, programs: int, count: int) -> KernelCost:
        """A push by a kernel on so many SMs: each has its share of what these reach together."""
        per_sm = self._sent(operation, operation.destinations, programs) / programs
        moved = self._bytes(operation, operation.sources) / max(count, 1)
        return KernelCost(count, moved / per_sm / 1e3 + self._machine.latency.copy_tile.us)

    def _summed_by_library(self, operation: Reduce) -> tuple[KernelCost, ...]:
        """The library's ordered sum, one kernel after the other (runtime/library/library.py): widen the first operand
        to fp32, add each further one to that, narrow the total. Each reads and writes memory once, one program per SM.
        """
        elements, item = size(operation.out), self._item(operation)
        if not elements:
            return ()
        passes = self._machine.element_wise
        widen = (item + FP32_BYTES) / passes.widen.gb_per_s
        add = (FP32_BYTES + item + FP32_BYTES) / passes.add.gb_per_s
        narrow = (FP32_BYTES + item) / passes.narrow.gb_per_s
        programs = min(self._machine.processor.sms, elements)
        # A sum that is kept in fp32 is the total already (runtime/library/library.py).
        is_total = len(operation.operands) == 1 and self._buffers[operation.operands[0].buffer].dtype == "float32"
        first = () if is_total else (widen,)
        element_ns = (*first, *(add for _ in operation.operands[1:]), narrow)
        return tuple(KernelCost(programs, elements * each / 1e3) for each in element_ns)

    def _moved_within(self, operation: PricedMove) -> KernelCost:
        """A copy within a rank, or zeros: a kernel that reads and writes its own memory, one program per SM."""
        rate = self._machine.hbm if isinstance(operation, Clear) else self._machine.local_copies
        moving_us = self._bytes(operation, (*operation.sources, *operation.destinations)) / rate.gb_per_s
        elements = sum(map(size, operation.destinations))
        return KernelCost(min(self._machine.processor.sms, elements), moving_us / 1e3)

    def packed_us(self, operation: Operation, peers: int) -> float:
        """A push in messages that carry their flag, which shares the port with those to the other peers; the launch and
        the read of the product included, unless what it sends is still in registers. Or what waits for messages: a look
        more when a sum's last one is there. A thread adds, sends on and stores its message while others still arrive.

        MEASURED: beyond the matmul 3.5 to 36 us for 8 KiB to 8 MiB (2 x H200, captured calls,
        benchmarks/results/packed.h200x2.2026-11-22.txt). With that both shots are predicted within 1.6 us in all 20
        rows of the file; to charge memory for the sums as well missed by 6 us at 8 MiB.
        """
        machine = self._machine
        if not isinstance(operation, Put):
            return machine.latency.observe.us if isinstance(operation, Reduce) else 0.0
        carried = self._bytes(operation, operation.sources) * MESSAGE_BYTES / MESSAGE_DATA_BYTES
        linked = peers * self._linked(operation, operation.destinations)
        moving_us = peers * carried / min(machine.links.sm_push.gb_per_s(machine.processor.sms), linked) / 1e3
        return moving_us + (0.0 if operation.waits else machine.latency.kernel.us + machine.latency.copy_tile.us)

    def segments(self, operation: Put | Get | Copy) -> tuple[Segment, ...]:
        """The copies of a move between ranks, in order. Empty ones are left out."""
        pairs = zip(operation.sources, operation.destinations, strict=True)
        return tuple(self._segment(operation, *pair) for pair in pairs if not pair[0].is_empty)

    def _segment(self, operation: Put | Get | Copy, source: Region, target: Region) -> Segment:
        is_whole = self._is_contiguous(source) and self._is_contiguous(target)
        move = source.rank, target.rank, self._bytes(operation, (source,)), isinstance(operation, Get), is_whole
        if move not in self._moves:
            self._moves[move] = Segment(source.rank, target.rank, self._move_us(*move))
        return self._moves[move]

    def _move_us(self, source: int, target: int, moved: int, is_pulled: bool, is_whole: bool) -> float:
        """Of one copy alone: as long as the copy engine takes, or the slowest link of the route."""
        machine, links = self._machine, self._machine.links
        if source == target:
            return 2 * moved / machine.local_copies.gb_per_s / 1e3
        by_engine_us = (links.pull if is_pulled else links.push).time_us(moved)
        alone_us = max(by_engine_us, machine.routes.time_us(source, target, moved))
        return alone_us if is_whole else alone_us * links.strided.factor

    def collective_us(self, parts: list[Collective]) -> float:
        """One library collective over the ranks of its parts, once all have arrived."""
        first, machine = parts[0], self._machine
        total = self._bytes(first, first.destinations if first.function == "all_gather" else first.sources)
        if not total:
            return 0.0
        # As much leaves a rank in an all-to-all of so many bytes as in an all-gather of as many: so its rate is taken.
        function = "all_gather" if first.function == "all_to_all" else first.function
        return max(0.0, machine.collective_us(function, len(parts), total) - machine.latency.call.us)

    def _pulled(self, operation: Operation, regions: Iterable[Region], sms: int) -> float:
        """GB/s that a kernel on so many SMs reads of regions of peers."""
        return min(self._machine.links.sm_pull.gb_per_s(sms), self._linked(operation, regions))

    def _sent(self, operation: Operation, regions: Iterable[Region], sms: int) -> float:
        """GB/s that a kernel on so many SMs stores to regions of peers."""
        return min(self._machine.links.sm_push.gb_per_s(sms), self._linked(operation, regions))

    def _linked(self, operation: Operation, regions: Iterable[Region]) -> float:
        """GB/s of the links to all the peers that have a region; without end where none has."""
        routes, rank = self._machine.routes, operation.rank
        peers = {region.rank for region in regions} - {rank}
        return sum(routes.alone_gb_per_s(rank, peer) for peer in peers) if peers else inf

    def _shape(self, operation: Compute) -> MatmulShape:
        """With a gate's product beside that of each tile, as many columns more."""
        rows, cols, k = matmul_shape(operation)
        return rows, cols * self._products, k

    def _dtypes(self, operation: Compute) -> Dtypes:
        return self._realization.dtype, self._buffers[operation.out[0].buffer].dtype or self._realization.dtype

    def _item(self, operation: Operation) -> int:
        """Bytes of an element that an operation moves, adds or stores."""
        return self._buffers[operation.writes[0].buffer].itemsize_bytes(self._realization.dtype)

    def _bytes(self, operation: Operation, regions: Iterable[Region]) -> int:
        elements = sum(map(size, regions))
        return elements * self._item(operation) if elements else 0

    def _near_and_far(self, operation: Operation, regions: Iterable[Region]) -> tuple[int, int]:
        """Bytes that an operation reads on its own rank, and on peers."""
        own = [region for region in regions if region.rank == operation.rank]
        near = self._bytes(operation, own)
        return near, self._bytes(operation, regions) - near

    def _is_contiguous(self, region: Region) -> bool:
        return region.shape[0] == 1 or region.shape[1] == self._buffers[region.buffer].cols


def tile_us(machine: Machine, rate: TileRate, shape: MatmulShape, dtype: Dtype) -> float:
    """One tile `[block_m, block_n]` over `k`, every SM busy. A ragged tile costs as much as a full one."""
    block_m, block_n, k = shape
    per_sm = rate.tflops * machine.dtype_share(dtype) * 1e6 / machine.processor.sms
    return 2.0 * block_m * block_n * k / per_sm + rate.overhead_us


def library_matmul_us(machine: Machine, shape: MatmulShape, dtype: Dtype, is_added: bool = False) -> float:
    """A library matmul `(m, n, k)` alone, as a call is timed. is_added: to sums that are kept in fp32."""
    work = _library_work(machine, shape, (dtype, "float32" if is_added else dtype), is_added)
    waves = -(-work.count // machine.processor.sms)
    return machine.latency.call.us + machine.latency.kernel.us + waves * work.tile_us


@lru_cache(maxsize=4096)
def _library_work(machine: Machine, shape: MatmulShape, dtypes: Dtypes, accumulates: bool) -> KernelCost:
    """Tiles of the shape that finishes first by whole waves. accumulates: what is there is read and added to."""
    rows, cols, k = shape
    best, best_us = KernelCost(0, 0.0), float("inf")
    for rate in machine.tiles_of("library"):
        count = tiles_of(rows, cols, rate.block_m, rate.block_n)
        each = tile_us(machine, rate, (rate.block_m, rate.block_n, k), dtypes[0])
        each = max(each, _memory_tile_us(machine, shape, dtypes, count, accumulates))
        total = -(-count // machine.processor.sms) * each
        if total < best_us:
            best, best_us = KernelCost(count, each), total
    return best


def matmul_shape(operation: Compute) -> MatmulShape:
    """(rows, cols, k) of one Compute."""
    rows = sum(region.shape[0] for region in operation.a)
    return rows, operation.b.shape[1], operation.b.shape[0]


def size(region: Region) -> int:
    """Elements of a region."""
    return 0 if region.is_empty else region.shape[0] * region.shape[1]


def moves_between_ranks(operation: PricedMove) -> bool:
    """Whether the operation's bytes cross a link."""
    return any(
        source.rank != target.rank for source, target in zip(operation.sources, operation.destinations, strict=True)
    )


def _memory_tile_us(
    machine: Machine, shape: MatmulShape, dtypes: Dtypes, count: int, accumulates: bool = False, beside: int = 0
) -> float:
    """Time of a tile if its operation were bound by memory: each operand element is read, each result written once.
    beside: bytes that are read besides."""
    rows, cols, k = shape
    item, out_item = (ITEMSIZE_BYTES[dtype] for dtype in dtypes)
    moved = (rows * k + k * cols) * item + rows * cols * out_item * (2 if accumulates else 1) + beside
    waves = -(-count // machine.processor.sms)
    return moved / machine.hbm.gb_per_s / 1e3 / max(waves, 1)
