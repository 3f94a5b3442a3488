"""Microseconds of a tile, a cuBLAS matmul, a copy, a collective and a reduction, each alone on a described machine.

simulate.py models how they slow each other down. Not modelled: host time (calls are launched ahead of the GPU), clocks
that rise when SMs idle or fall with power, L2 hits and misses, differences between SMs.
SOURCE: the wave model of FlashOverlap, section 4; decomposition loss as in FiCCO, section IV-C.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import combinations
from math import inf, prod, sqrt

from msgspec import Struct

from overweave.errors import ScheduleError
from overweave.hardware.machine import Machine, TileRate
from overweave.ir.blocks import regions_by_member
from overweave.ir.dtype import ITEMSIZE_BYTES, Dtype, MovedDtype
from overweave.ir.footprint import Operand, TileSpace
from overweave.ir.plan import AUTHOR_KERNEL, MESSAGE_BYTES, MESSAGE_DATA_BYTES, MatmulConfig, Plan, indexed_name
from overweave.ir.schedule import OUTPUT, Apply, Clear, Collective, Compute, Copy, Get, Operation, Put, Reduce, Region
from overweave.sim.nccl import CrossingCall, SentBytes, collective_us, crossing_of, exchange_of, islands_of, sms_of
from overweave.sim.order import LaunchStep, QueueRun, tiles_of

PricedMove = Put | Get | Copy | Clear  # and a ReducePut, which is a Put
MatmulShape = tuple[int, int, int]  # rows, columns, k
# Microseconds of a tile of an author's kernel, every SM busy; or of each operation, whose one tile has all SMs.
AuthorTile = float | Callable[[Apply], float]
Dtypes = tuple[Dtype, MovedDtype]  # of a matmul's operands, and of its result
FP32_BYTES = ITEMSIZE_BYTES["float32"]
# A tile reads several addends strip by strip, each strip when the one before is stored: slower than its SM's share.
# MEASURED: fitted to the 18 rows of sums=epilogue in benchmarks/results/plans.matmul_reduce_scatter.h200x4.2026-11-20,
# three addends a tile: their mean error is 1.5 % with it and 5.0 % without, where the reduction kernel's is 0.4 %.
STRIP_SLOWDOWN = 2.5


class KernelCost(Struct, frozen=True):
    """The work of a kernel for one operation: `count` equal tiles, each `tile_us` on an SM of its own.

    late_us: of a tile, after its product and its late signals. stored_us: of a tile's stores to peers beyond that,
    while its SM computes the next tile.
    """

    count: int
    tile_us: float
    late_us: float = 0.0
    stored_us: float = 0.0


class Segment(Struct, frozen=True):
    """One copy between two ranks or within one. alone_us: its time without other copies."""

    source: int
    target: int
    alone_us: float


class Costs:
    """The time of each operation of a plan alone on a machine. author_tile_us: of one tile of an author's kernel."""

    def __init__(self, plan: Plan, machine: Machine, author_tile_us: AuthorTile | None = None) -> None:
        self._name, self._realization, self._machine = plan.name, plan.realization, machine
        self._author_tile_us = author_tile_us
        self._moves: dict[tuple[int, int, int, bool, bool], Segment] = {}  # arguments of `_move_us` -> copy
        self._buffers = {buffer.name: buffer for buffer in plan.schedule.buffers}
        self._problem = plan.problem
        self._products = plan.problem.epilogue.products  # matmuls of each tile: 2 if it is gated
        computes = [each for each in plan.schedule.operations if isinstance(each, Compute)]
        # (rank, whether stored at every peer) -> tiles of the rank that are stored at peers
        self._tiles_at_peers: Counter[tuple[int, bool]] = Counter()
        for each in computes:
            if each.stored_at - {each.rank}:
                self._tiles_at_peers[each.rank, bool(each.copies)] += each.tiles

    def tiles(self, step: LaunchStep, run: QueueRun, count: int, beside: int) -> KernelCost:
        """Return the cost of a kernel's tiles of one run. count: tiles of its operation. beside: tiles of its launch.

        Raises ScheduleError if the realization has no config for them, or without `author_tile_us` for an author's.
        """
        copy, sms = self._realization.copy, self._machine.processor.sms
        match step.operation:
            case Reduce() as operation:
                return self._reduction_tiles(operation, count, beside)
            case Put() as operation if step.engine == AUTHOR_KERNEL:
                return self._push_tiles(operation, sms, count)
            case (Put() | Copy()) as operation if copy is not None:
                return self._push_tiles(operation, min(copy.programs, sms), count)
            case Compute() as operation if self._realization.matmul is not None:
                return self._matmul_tiles(operation, self._realization.matmul, run, count)
            case Apply() as operation if self._author_tile_us is not None:
                # A tile computes equal parts, each after a signal; only the wait before the last part is modelled.
                whole_us = self._author_tile_us
                whole_us = whole_us(operation) if callable(whole_us) else whole_us
                behind_us = whole_us / len(operation.late_waits) if operation.late_waits else 0.0
                return KernelCost(count, whole_us - behind_us, behind_us)
        found, cure = "its queue has an engine that cannot run it", "Name another engine in the realization"
        if isinstance(step.operation, Compute):
            found, cure = "the realization has no matmul config", "Give it one, or take a plan of the catalog"
        if isinstance(step.operation, Apply):
            found = "nobody knows how long a tile of a compiled kernel takes"
            cure = "Give the time, as `overweave simulate --tile-us 10` does"
        raise ScheduleError(f"time of {step.operation.name}", found, cure)

    def alone(self, operation: Operation) -> tuple[KernelCost, ...]:
        """Return the kernels of an operation that a stream runs, one after the other."""
        match operation:
            case Compute():
                return (self._cublas_matmul(operation),)
            case Reduce():
                return self._torch_sum(operation)
            case Put() | Get() | Copy() | Clear():
                return (self._local_copy(operation),)
        return ()

    def _matmul_tiles(self, operation: Compute, config: MatmulConfig, run: QueueRun, count: int) -> KernelCost:
        """Return the cost of matmul tiles: the longest of tensor cores, memory, and stores to peers."""
        block_m, block_n = config.block_m, (run.width or config.block_n) * self._products
        shape, machine = self._shape(operation), self._machine
        rate = machine.tile(config.kernel, block_m, block_n)
        alone_us = tile_us(machine, rate, (block_m, block_n, shape[2]), self._realization.dtype)
        beside = 0 if operation.addends else self._beside(self._problem.product_epilogue.reads_rows, operation.out)
        us = max(alone_us, _memory_tile_us(machine, *self._read_together(operation, shape), beside=beside))
        stored_us = self._stores_us(operation, count)
        return KernelCost(count, max(us, stored_us), self._addends_us(operation, config, count), min(us, stored_us))

    def _read_together(self, operation: Compute, shape: MatmulShape) -> tuple[MatmulShape, Dtypes, int]:
        """Return (shape, dtypes, tiles) of the tiles that share operands in memory: of the operation, or, if its output
        is blocks of a permuted buffer, of the whole product.
        """
        buffer, dtypes = self._buffers[operation.out[0].buffer], self._dtypes(operation)
        if buffer.blocks is None:
            return shape, dtypes, operation.tiles
        return (buffer.rows, buffer.cols, shape[2]), dtypes, len(buffer.blocks.places)

    def _addends_us(self, operation: Compute, config: MatmulConfig, count: int) -> float:
        """Return the time of one of `count` tiles to poll for its addends and to read them.

        Each SM has an equal part of the bandwidth of HBM, or of the links to peers.

        The Hopper kernel reads a single own addend while it multiplies (kernels/hopper/tile_end.py).
        """
        machine = self._machine
        if not operation.addends:
            return 0.0
        if config.kernel == "hopper" and [addend.rank for addend in operation.addends] == [operation.rank]:
            return machine.latency.observe.us
        own, far = self._near_and_far(operation, operation.addends)
        own += self._beside(operation.finishes, operation.out)
        sms = machine.processor.sms
        from_hbm, from_peers = machine.hbm.gb_per_s / sms, self._pull_gb_per_s(operation, operation.addends, sms) / sms
        read_us = (STRIP_SLOWDOWN * own / from_hbm + far / from_peers) / max(count, 1) / 1e3
        return machine.latency.observe.us + read_us

    def _stores_us(self, operation: Compute, count: int) -> float:
        """Return the time of one of `count` tiles to be stored at peers, by all SMs together, at the link's rate."""
        if operation.stored_at == {operation.rank}:
            return 0.0
        alike = self._tiles_at_peers[operation.rank, bool(operation.copies)]
        sms, stored = min(self._machine.processor.sms, max(alike, 1)), operation.copies or operation.out
        sent = self._bytes(operation, stored) / max(count, 1)
        return sent / 1e3 * sms / self._push_gb_per_s(operation, stored, sms)

    def _cublas_matmul(self, operation: Compute) -> KernelCost:
        """Return the cost of a cuBLAS matmul, or of our skinny matmul in its place: less by what that saves."""
        shape, realization = self._shape(operation), self._realization
        cost = _cublas_cost(self._machine, shape, self._dtypes(operation), operation.accumulate)
        first = indexed_name(operation.b.buffer.partition(".")[0], 0)  # of several weights, one is measured
        if realization.skinny is None or realization.packed is None or not cost.count or operation.b.buffer != first:
            return cost
        kind = "gather" if realization.packed.exchange == "gather" else "sum", realization.skinny.early
        known = [entry for entry in self._machine.few_rows if (entry.exchange, entry.early) == kind]
        waves = -(-cost.count // self._machine.processor.sms)
        saved_us = sum(entry.saved_us(*shape) for entry in known) / waves
        return KernelCost(cost.count, max(0.0, cost.tile_us - saved_us))

    def _reduction_tiles(self, operation: Reduce, count: int, beside: int) -> KernelCost:
        """Return the cost of the tiles of an ordered sum: each SM has an equal part of HBM and link bandwidth.

        beside: all tiles of its kernel, which share the link with it.
        """
        machine, sms = self._machine, self._machine.processor.sms
        own_bytes, far = self._near_and_far(operation, operation.operands)
        own, programs = own_bytes + self._bytes(operation, operation.writes), min(sms, max(beside, 1))
        of_rows = bool(self._problem.rows) and self._buffers[operation.out.buffer].home == OUTPUT
        own += self._beside(operation.finishes or of_rows, (operation.out,))
        from_hbm = machine.hbm.gb_per_s / sms
        from_peers = self._pull_gb_per_s(operation, operation.operands, programs) / programs
        moving_us = (own / from_hbm + far / from_peers) / max(count, 1) / 1e3
        return KernelCost(count, moving_us + machine.latency.reduce_tile.us)

    def _beside(self, is_read: bool, regions: Iterable[Region]) -> int:
        """Return the bytes that are read and made beside elements of the result."""
        return sum(self._problem.bytes_beside(*region.shape) for region in regions) if is_read else 0

    def _push_tiles(self, operation: Put | Copy, programs: int, count: int) -> KernelCost:
        """Return the cost of a push by a kernel on so many SMs: each has an equal part of their common bandwidth."""
        per_sm = self._push_gb_per_s(operation, operation.destinations, programs) / programs
        moved = self._bytes(operation, operation.sources) / max(count, 1)
        return KernelCost(count, moved / per_sm / 1e3 + self._machine.latency.copy_tile.us)

    def _torch_sum(self, operation: Reduce) -> tuple[KernelCost, ...]:
        """Return the kernels of torch's ordered sum (runtime/library/library.py): widen the first operand to fp32, add
        each further one, narrow the total. Each reads and writes memory once, one program per SM.
        """
        elements, item = size(operation.out), self._item(operation)
        if not elements:
            return ()
        passes = self._machine.element_wise
        widen = (item + FP32_BYTES) / passes.widen.gb_per_s
        add = (FP32_BYTES + item + FP32_BYTES) / passes.add.gb_per_s
        narrow = (FP32_BYTES + item) / passes.narrow.gb_per_s
        programs = min(self._machine.processor.sms, elements)
        # A single fp32 operand needs no widening (runtime/library/library.py).
        is_total = len(operation.operands) == 1 and self._buffers[operation.operands[0].buffer].dtype == "float32"
        first = () if is_total else (widen,)
        element_ns = (*first, *(add for _ in operation.operands[1:]), narrow)
        return tuple(KernelCost(programs, elements * each / 1e3) for each in element_ns)

    def _local_copy(self, operation: PricedMove) -> KernelCost:
        """Return the cost of a copy within a rank, or of zeroing memory: one program per SM."""
        rate = self._machine.hbm if isinstance(operation, Clear) else self._machine.local_copies
        moving_us = self._bytes(operation, (*operation.sources, *operation.destinations)) / rate.gb_per_s
        elements = sum(map(size, operation.destinations))
        return KernelCost(min(self._machine.processor.sms, elements), moving_us / 1e3)

    def packed_us(self, operation: Operation, peers: int) -> float:
        """Return the time of an operation of a packed kernel.

        A push shares the port with those to the other peers; it includes the launch and the read of the product, unless
        it has waits: then it sends from registers. A sum takes one poll after its last message: a thread adds, forwards
        and stores its message while others still arrive.

        MEASURED: beyond the matmul 3.5 to 36 us for 8 KiB to 8 MiB (2 x H200, captured calls,
        benchmarks/results/packed.h200x2.2026-11-22.txt). With that both shots are predicted within 1.6 us in all 20
        rows of the file; to charge memory for the sums as well missed by 6 us at 8 MiB.
        """
        machine = self._machine
        if not isinstance(operation, Put):
            return machine.latency.observe.us if isinstance(operation, Reduce) else 0.0
        sent_bytes = self._bytes(operation, operation.sources) * MESSAGE_BYTES / MESSAGE_DATA_BYTES
        link_gb_per_s = peers * self._link_gb_per_s(operation, operation.destinations)
        moving_us = peers * sent_bytes / min(machine.links.sm_push.gb_per_s(machine.processor.sms), link_gb_per_s) / 1e3
        return moving_us + (0.0 if operation.waits else machine.latency.kernel.us + machine.latency.copy_tile.us)

    def segments(self, operation: Put | Get | Copy) -> tuple[Segment, ...]:
        """Return the copies of a move between ranks, in order, without empty ones."""
        pairs = zip(operation.sources, operation.destinations, strict=True)
        return tuple(self._segment(operation, *pair) for pair in pairs if not pair[0].is_empty)

    def _segment(self, operation: Put | Get | Copy, source: Region, target: Region) -> Segment:
        """Return one copy of a move, from a cache."""
        is_whole = self._is_contiguous(source) and self._is_contiguous(target)
        move = source.rank, target.rank, self._bytes(operation, (source,)), isinstance(operation, Get), is_whole
        if move not in self._moves:
            self._moves[move] = Segment(source.rank, target.rank, self._move_us(*move))
        return self._moves[move]

    def _move_us(self, source: int, target: int, moved: int, is_pulled: bool, is_whole: bool) -> float:
        """Return the time of one copy alone: the longer of the copy engine's and the slowest link's."""
        machine, links = self._machine, self._machine.links
        if source == target:
            return 2 * moved / machine.local_copies.gb_per_s / 1e3
        by_engine_us = (links.pull if is_pulled else links.push).time_us(moved)
        alone_us = max(by_engine_us, machine.routes.time_us(source, target, moved))
        return alone_us if is_whole else alone_us * links.strided.factor

    def collective_us(self, part: Collective) -> float:
        """Return the time of the NCCL collective that a part belongs to, once all have arrived."""
        total = self._collective_bytes(part)
        alone_us = collective_us(self._machine, part.function, part.ranks, total) if total else 0.0
        return max(0.0, alone_us - self._machine.latency.call.us)

    def crossing(self, parts: Sequence[Collective]) -> CrossingCall | None:
        """Return how NCCL runs a collective over several islands, of which these parts are known; None inside one, and
        if it moves nothing."""
        first, machine = parts[0], self._machine
        if first.function != "all_to_all":
            total = self._collective_bytes(first)
            return crossing_of(machine, first.function, first.ranks, total) if total else None
        sent = tuple(map(self._sent, parts))
        moves = any(each.inside_bytes or each.between_bytes for each in sent)
        is_apart = len(islands_of(machine, first.ranks)) > 1
        return exchange_of(machine, first.ranks, sent) if moves and is_apart else None

    def _sent(self, part: Collective) -> SentBytes:
        """Return what a rank sends in an all-to-all."""
        island_of, inside, peers = self._machine.routes.island_of, 0.0, dict[int, int]()
        for member, regions in zip(part.ranks, regions_by_member(part.sources, True, len(part.ranks)), strict=False):
            size_bytes = self._bytes(part, regions)
            if island_of[member] != island_of[part.rank]:
                peers |= {member: size_bytes} if size_bytes else {}
            elif member != part.rank:
                inside += size_bytes
        return SentBytes(part.rank, inside, sum(peers.values()), tuple(peers))

    def collective_sms(self, part: Collective) -> int:
        """Return the SMs that a rank's part holds: NCCL's channels, as many as the plan allows."""
        sms = sms_of(self._machine, part.ranks)
        return min(sms, self._realization.library_sms or self._machine.processor.sms)

    def _collective_bytes(self, part: Collective) -> int:
        """Return the total bytes of a collective, as of a CollectiveCurve."""
        return self._bytes(part, part.destinations if part.function == "all_gather" else part.sources)

    def _pull_gb_per_s(self, operation: Operation, regions: Iterable[Region], sms: int) -> float:
        """Return GB/s at which a kernel on so many SMs reads regions of peers."""
        return min(self._machine.links.sm_pull.gb_per_s(sms), self._link_gb_per_s(operation, regions))

    def _push_gb_per_s(self, operation: Operation, regions: Iterable[Region], sms: int) -> float:
        """Return GB/s at which a kernel on so many SMs stores to regions of peers."""
        return min(self._machine.links.sm_push.gb_per_s(sms), self._link_gb_per_s(operation, regions))

    def _link_gb_per_s(self, operation: Operation, regions: Iterable[Region]) -> float:
        """Return GB/s of the links to all peers that own a region; infinite if none does."""
        routes, rank = self._machine.routes, operation.rank
        peers = {region.rank for region in regions} - {rank}
        return sum(routes.alone_gb_per_s(rank, peer) for peer in peers) if peers else inf

    def _shape(self, operation: Compute) -> MatmulShape:
        """Return (rows, cols, k) of a Compute; a gated one has twice the columns."""
        rows, cols, k = matmul_shape(operation)
        return rows, cols * self._products, k

    def _dtypes(self, operation: Compute) -> Dtypes:
        return self._realization.dtype, self._buffers[operation.out[0].buffer].dtype or self._realization.dtype

    def _item(self, operation: Operation) -> int:
        """Return the bytes of an element that an operation moves, adds or stores."""
        return self._buffers[operation.writes[0].buffer].itemsize_bytes(self._realization.dtype)

    def _bytes(self, operation: Operation, regions: Iterable[Region]) -> int:
        elements = sum(map(size, regions))
        return elements * self._item(operation) if elements else 0

    def _near_and_far(self, operation: Operation, regions: Iterable[Region]) -> tuple[int, int]:
        """Return the bytes that an operation reads on its own rank, and on peers."""
        own = [region for region in regions if region.rank == operation.rank]
        near = self._bytes(operation, own)
        return near, self._bytes(operation, regions) - near

    def _is_contiguous(self, region: Region) -> bool:
        return region.shape[0] == 1 or region.shape[1] == self._buffers[region.buffer].cols


def tile_us(machine: Machine, rate: TileRate, shape: MatmulShape, dtype: Dtype) -> float:
    """Return the time of one tile `[block_m, block_n]` over `k`, every SM busy. A ragged tile costs as much."""
    block_m, block_n, k = shape
    per_sm = rate.tflops * machine.dtype_share(dtype) * 1e6 / machine.processor.sms
    return 2.0 * block_m * block_n * k / per_sm + rate.overhead_us


def library_matmul_us(machine: Machine, shape: MatmulShape, dtype: Dtype, is_added: bool = False) -> float:
    """Return the time of a cuBLAS matmul `(m, n, k)` alone, with its call. is_added: to fp32 sums."""
    work = _cublas_cost(machine, shape, (dtype, "float32" if is_added else dtype), is_added)
    waves = -(-work.count // machine.processor.sms)
    return machine.latency.call.us + machine.latency.kernel.us + waves * work.tile_us


@lru_cache(maxsize=4096)
def _cublas_cost(machine: Machine, shape: MatmulShape, dtypes: Dtypes, accumulates: bool) -> KernelCost:
    """Return the cost with the tile shape that ends first, by whole waves. accumulates: the output is read, too."""
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
    """Return (rows, cols, k) of one Compute."""
    rows = sum(region.shape[0] for region in operation.a)
    return rows, operation.b.shape[1], operation.b.shape[0]


def size(region: Region) -> int:
    return 0 if region.is_empty else region.shape[0] * region.shape[1]


def moves_between_ranks(operation: PricedMove) -> bool:
    return any(
        source.rank != target.rank for source, target in zip(operation.sources, operation.destinations, strict=True)
    )


def _memory_tile_us(
    machine: Machine, shape: MatmulShape, dtypes: Dtypes, count: int, accumulates: bool = False, beside: int = 0
) -> float:
    """Return the time of a tile bound by memory: each operand element is read once, each result written once.

    beside: bytes that are read besides.
    """
    rows, cols, k = shape
    item, out_item = (ITEMSIZE_BYTES[dtype] for dtype in dtypes)
    moved = (rows * k + k * cols) * item + rows * cols * out_item * (2 if accumulates else 1) + beside
    waves = -(-count // machine.processor.sms)
    return moved / machine.hbm.gb_per_s / 1e3 / max(waves, 1)


# Estimate the time of a tile of an author's kernel from the elements that its directives declare.


def estimate_tile_us(machine: Machine, space: TileSpace, dtype: Dtype) -> float:
    """Return microseconds of one tile, every SM busy: the longer of memory time and tensor-core time.

    Memory: all operands are read or written once, in equal parts by all waves. Tensor cores: if the tile reads two
    operands or more, each store is taken for the contraction of the two largest, `[m, k] @ [k, n]`; the three sizes
    give m, n and k. Exact for matmuls, within a small factor for attention; other arithmetic is not modelled.
    """
    reads, writes = ([_elements(space, one) for one in side] for side in (space.loads, space.stores))
    moved = sum(one.rows * one.cols for one in (*space.loads, *space.stores)) * ITEMSIZE_BYTES[dtype]
    waves = max(1, -(-space.tile_count // machine.processor.sms))
    by_memory = moved / machine.hbm.gb_per_s / 1e3 / waves
    if len(reads) < 2 or not all((*reads, *writes)):
        return by_memory
    a, b = max(combinations(reads, 2), key=sum)
    return max(by_memory, sum(_contraction_us(machine, (a, b, out), dtype) for out in writes))


def _contraction_us(machine: Machine, elements: tuple[int, int, int], dtype: Dtype) -> float:
    """Return the time of a contraction. elements: of `a`, `b` and their product, from which m, n and k follow."""
    a, b, out = elements
    m, n, k = (max(1, round(side)) for side in (sqrt(a * out / b), sqrt(b * out / a), sqrt(a * b / out)))
    return tile_us(machine, machine.tile("portable", m, n), (m, n, k), dtype)


def _elements(space: TileSpace, operand: Operand) -> int:
    """Return the elements of an operand that the first tile accesses, over all its loop iterations."""
    first = {axis.name: 0 for axis in space.grid}
    return prod(hi - lo for lo, hi in (space.touched(dim, first) for dim in operand.dims))
