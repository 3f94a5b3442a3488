"""Whether tile tables match the schedule: every tile of every operation once, with its waits and signal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from overweave.ir.dtype import SUM_DTYPE
from overweave.ir.plan import (
    AUTHOR_KERNEL,
    KERNELS,
    MOST_WEIGHTS,
    TILE_KERNEL,
    MatmulConfig,
    Plan,
    gate_obstacle,
    narrow_width,
    split_obstacle,
    step_obstacle,
)
from overweave.ir.schedule import INPUT, OUTPUT, Apply, Buffer, Compute, Copy, Operation, Put, Reduce, ReducePut, Region
from overweave.ir.tile_order import (
    COPY,
    MULTIPLY,
    NO_SIGNAL,
    OWN_SHARD,
    PART,
    REDUCE,
    WORKSPACE,
    TileOrder,
    TileRow,
    outputs,
    ranks_to_notify,
)
from overweave.ir.verify.engines.norm import applies_epilogue
from overweave.ir.verify.engines.stores import check_addends, check_block_stores, check_copy, check_stores
from overweave.ir.verify.rules.author_tables import (
    check_parts,
    check_slice_sources,
    check_slices,
    check_tile_numbers,
    note_operand_buffers,
)
from overweave.ir.verify.rules.graphs import Graph, SignalIndex
from overweave.ir.verify.rules.values import check_scale_rows
from overweave.ir.verify.rules.verdict import Findings

OUT = "out"
LoweredRows = tuple[int, int, int, int, int, int]  # row, row_end, col, source, source_row, width


def check_tables(plan: Plan, graph: Graph, rank: int | None, findings: Findings) -> None:
    """Check one table for each kernel queue of the rank (None: of every rank), and refuse any other table."""
    ranks = range(plan.schedule.world_size) if rank is None else (rank,)
    kernels = {one.queue for one in plan.realization.engines if one.engine in KERNELS}
    tables = {(order.rank, order.queue): order for order in plan.tile_orders}
    if len(tables) != len(plan.tile_orders):
        findings.add("lowering", None, "a rank's queue has two tile tables")
    for table_rank, queue in tables.keys() - {(one, queue) for one in ranks for queue in kernels}:
        findings.add("lowering", None, f"there is a tile table for queue {queue} of rank {table_rank}, which has none")
    for one in ranks:
        for queue in sorted(kernels):
            positions = [position for position in graph.of_rank[one] if graph.operations[position].queue == queue]
            if (one, queue) in tables:
                _Table(plan, graph, tables[one, queue], findings).check(positions)
            elif positions:
                findings.add("lowering", graph.operations[positions[0]], f"queue {queue} has no tile table")


class _Table:
    """Compares one table with the operations of its rank and queue."""

    def __init__(self, plan: Plan, graph: Graph, order: TileOrder, findings: Findings) -> None:
        self.plan, self.graph, self.order, self.findings = plan, graph, order, findings
        self.buffers = {buffer.name: buffer for buffer in plan.schedule.buffers}
        self.homes = {name: buffer.home for name, buffer in self.buffers.items()}
        self.weights = plan.schedule.weights
        self.outs = {weight: outputs(plan.schedule, order.rank, weight) for weight in self.weights}  # by weight
        self.after = next(queue.after for queue in plan.schedule.queues if queue.name == order.queue)
        self.is_author = plan.realization.engine_of(order.queue) == AUTHOR_KERNEL
        self.is_matmul = plan.realization.engine_of(order.queue) == TILE_KERNEL
        config = plan.realization.matmul if self.is_matmul else plan.realization.reduction
        # Engines are checked first: what has no config here is a copy kernel, which has no blocks.
        self.block_m, self.block_n = (config.block_m, config.block_n) if config else (0, 0)
        self.matmul = config if isinstance(config, MatmulConfig) else None

    def check(self, positions: list[int]) -> None:
        """Compare the table with the operations at these positions, those of its rank and queue."""
        tile_rows, parts, slices = self._split_sections()
        tiles: list[list[TileRow]] = [[] for _ in positions]
        if not all(self._group_by_operation(rows, positions, tiles) for rows in (tile_rows, slices)):
            return
        if self.is_author:
            before = dict(enumerate(accumulate((len(rows) for rows in _slices_only(tiles)), initial=0)))
            check_slices(tile_rows, before, len(slices), self.findings)
        operands: dict[str, set[str]] = {}
        implied = self._implied_waits(positions)
        for position, rows in zip(positions, tiles, strict=True):
            operation = self.graph.operations[position]
            self._check_signals(position, rows, implied[position])
            base = self.order.rank * self.graph.signals_per_rank
            late = {key - base: self.graph.full[key] for key in self.graph.late.get(position, ())}
            late = {} if isinstance(operation, Apply) else late
            weight = self.weights.index(operation.b.buffer) if isinstance(operation, Compute) else 0
            if any(row.weight != weight for row in rows):
                self.findings.add("lowering", operation, "a tile multiplies by another weight")
            into = self._output_index(operation) if isinstance(operation, Compute) else 0
            if any(row.into != into for row in rows):
                self.findings.add("lowering", operation, "a tile writes another output")
            if any(row.finishes != applies_epilogue(operation) for row in rows):
                self.findings.add("lowering", operation, "a tile finishes its sum, or does not, against its operation")
            check_stores(operation, rows, self.plan.schedule.world_size, self.findings)
            check_addends(operation, rows, late, self.buffers, self.findings)
            if isinstance(operation, Compute):
                _note_operands(operation, self.buffers, operands, f"{OUT} of {operation.b.buffer}")
                self._note_addend_dtypes(operands, (*operation.addends, *operation.writes) if operation.addends else ())
                self._check_compute(operation, rows)
                check_scale_rows(operation, self.buffers, self.plan.realization.dtype, self.findings)
            elif isinstance(operation, Apply):
                check_tile_numbers(operation, rows, self.homes, self.findings)
                note_operand_buffers(operation, self.buffers, operands)
                check_parts(operation, parts, (self.graph, self.after), self.findings)
            elif isinstance(operation, Reduce):
                first, *rest = operation.operands
                self._note_addend_dtypes(operands, (*rest, operation.out))
                dtype = self.plan.dtype_of(first.buffer)
                operands.setdefault("dtype of the first operand", set()).add(dtype)
                has_map = self.buffers[first.buffer].blocks is not None
                operands.setdefault("map of blocks", set()).add(first.buffer if has_map else "none")
                self._check_reduce(operation, rows)
            elif isinstance(operation, Put | Copy):
                self._check_move(operation, rows, operands)
        self._check_weights(positions)
        for role, names in operands.items():
            most = 2 if role.startswith(OUT) and len(self.weights) == 1 else 1
            if len(names) > most:
                uses = f"queue {self.order.queue} on rank {self.order.rank} uses {', '.join(sorted(names))} as {role}"
                self.findings.add("lowering", None, f"{uses}; a kernel has {'two' if most == 2 else 'one'}")

    def _check_move(self, move: Put | Copy, rows: list[TileRow], operands: dict[str, set[str]]) -> None:
        """Check the tiles of a Put or a Copy, and note its operands."""
        mode = "adds" if isinstance(move, ReducePut) else "moves"
        operands.setdefault("way to push", set()).update((mode,) if isinstance(move, Put) else ())
        homes = () if not self.is_author else (INPUT, OUTPUT)  # elsewhere a table says where
        source_buffers = (part.buffer for part in move.sources)
        operands.setdefault("source", set()).update(
            name for name in source_buffers if not homes or self.buffers[name].home in homes
        )
        check_copy(move, rows, self.buffers, self.plan.realization.dtype, self.findings)
        if self.is_author and isinstance(move, Put):
            applies = (one for one in self.graph.operations if isinstance(one, Apply))
            check_slice_sources(move, applies, self.homes, self.findings)

    def _output_index(self, compute: Compute) -> int:
        return self.outs[compute.b.buffer].index(compute.out[0].buffer) if compute.out else 0

    def _check_weights(self, positions: list[int]) -> None:
        """Refuse more weights than a kernel takes: MOST_WEIGHTS, or one if it adds what peers sent."""
        computes = [one for position in positions if isinstance(one := self.graph.operations[position], Compute)]
        weights = {compute.b.buffer for compute in computes}
        if len(weights) > (1 if any(compute.addends for compute in computes) else MOST_WEIGHTS):
            message = f"queue {self.order.queue} on rank {self.order.rank} multiplies by {', '.join(sorted(weights))}"
            self.findings.add("lowering", None, f"{message}: more weights than its kernel takes")

    def _split_sections(self) -> tuple[list[TileRow], list[TileRow], list[TileRow]]:
        """Return the table's rows in three sections: tiles; late parts of an author's kernel; and slices that its tiles
        push."""
        tile_rows, parts, slices = list(self.order.rows), list[TileRow](), list[TileRow]()
        while self.is_author and tile_rows and tile_rows[-1].kind == COPY:
            slices.insert(0, tile_rows.pop())
        while tile_rows and tile_rows[-1].kind == PART:
            parts.insert(0, tile_rows.pop())
        if any(row.kind == PART for row in tile_rows):
            self.findings.add("lowering", None, f"queue {self.order.queue}: a part stands before a tile")
        if parts and not self.is_author:
            message = f"queue {self.order.queue} has parts, which its kernel knows nothing of"
            self.findings.add("lowering", None, message)
        return tile_rows, parts, slices

    def _group_by_operation(self, rows: list[TileRow], positions: list[int], tiles: list[list[TileRow]]) -> bool:
        """Add rows to the tiles of their operations. Return whether all have one, in launch order."""
        last = 0
        for row in rows:
            if not 0 <= row.operation < len(positions):
                message = f"a tile of queue {self.order.queue} on rank {self.order.rank} belongs to operation"
                self.findings.add("lowering", None, f"{message} {row.operation} of {len(positions)}")
                return False
            if row.operation < last:
                operation = self.graph.operations[positions[row.operation]]
                self.findings.add("lowering", operation, "its tiles are claimed behind those of a later operation")
                return False
            last = row.operation
            tiles[row.operation].append(row)
        return True

    def _check_signals(self, position: int, rows: list[TileRow], implied: set[SignalIndex]) -> None:
        """Check waits and notifies of an operation's tiles. Waits in `implied`, by the queue's `after`, may be
        missing."""
        operation = self.graph.operations[position]
        base = self.order.rank * self.graph.signals_per_rank  # tables number the own rank's signals from 0
        waited = self.graph.waited[position]
        early = {key - base for key in waited[: len(waited) - len(self.graph.late.get(position, ()))]}
        needed = early - {key - base for key in implied}
        signals = [key % self.graph.signals_per_rank for key in self.graph.notified[position]]
        notified, allowed = {notify.rank for notify in operation.notifies}, self._notifiable_ranks(operation)
        # Tiles of a Compute have no list of ranks: they notify everywhere they store, or nowhere.
        is_incomplete = isinstance(operation, Compute) and notified and notified != allowed
        if len(set(signals)) > 1 or not notified <= allowed or is_incomplete:
            self.findings.add("lowering", operation, "a tile can notify one signal, of its own rank or where it puts")
            return
        if isinstance(operation, Reduce) and len(notified) != len(operation.notifies):
            self.findings.add("lowering", operation, "a tile of a sum notifies a rank once")
            return
        signal = signals[0] if signals else NO_SIGNAL
        for lo, hi, count, notified_signal, also, also_count in {signal_fields(row) for row in rows}:
            waits = dict.fromkeys(range(lo, hi), count) if 0 <= lo <= hi <= lo + len(early) else {-1: count}
            waits |= {also: also_count} if also != NO_SIGNAL else {}
            if not needed <= waits.keys() <= early:
                message = f"a tile waits for signals [{lo}:{hi}] and {also}, not {sorted(needed)[:8]}"
                self.findings.add("lowering", operation, message)
            elif any(self.graph.full[key + base] != value for key, value in waits.items()):
                message = f"a tile waits until signals [{lo}:{hi}] are {count}"
                self.findings.add(
                    "lowering", operation, f"{message} and signal {also} is {also_count}" if also >= 0 else message
                )
            if notified_signal != signal:
                self.findings.add("lowering", operation, f"a tile notifies signal {notified_signal}, not {signal}")
        if not isinstance(operation, Compute) and any(row.shift for row in rows):
            self.findings.add("lowering", operation, "a tile has columns of a weight, and multiplies by none")
        if signals and len(rows) != operation.instances:
            message = f"its {len(rows)} tiles add as much to a signal that counts {operation.instances}"
            self.findings.add("lowering", operation, message)

    def _notifiable_ranks(self, operation: Operation) -> set[int]:
        """Return the ranks that tiles of an operation may notify."""
        if isinstance(operation, Put):
            return {operation.peer}
        if isinstance(operation, Reduce):  # any rank may read the sum in place
            return set(range(self.plan.schedule.world_size))
        if isinstance(operation, Compute):
            return ranks_to_notify(operation)
        stored = {region.rank for region in operation.writes} if isinstance(operation, Apply) else set()
        return stored if stored - {operation.rank} else {operation.rank}

    def _implied_waits(self, positions: list[int]) -> dict[int, set[SignalIndex]]:
        """Return for each operation the awaited signals that are complete when its kernel starts, by the queue's
        `after`."""
        own_positions, earlier = set(positions), Counter[SignalIndex]()
        implied: dict[int, set[SignalIndex]] = {}
        for position in self.graph.of_rank[self.order.rank]:
            operation = self.graph.operations[position]
            if position in own_positions:
                implied[position] = {key for key in self.graph.waited[position] if earlier[key] == self.graph.full[key]}
            elif operation.queue in self.after:
                for key in self.graph.notified[position]:
                    earlier[key] += operation.instances
        return implied

    def _check_compute(self, compute: Compute, rows: list[TileRow]) -> None:
        """Check the tiles of a Compute: their shape, rows and sources."""
        if len(rows) != compute.tiles:
            self.findings.add("lowering", compute, f"the table has {len(rows)} tiles of {compute.tiles}")
        obstacle = split_obstacle(self.plan.realization.matmul) if self.plan.realization.matmul else ""
        if obstacle:
            self.findings.add("lowering", compute, f"its tiles cannot be cut: {obstacle}")
        if self.matmul and self.plan.problem.epilogue.products > 1:
            obstacle = gate_obstacle(self.matmul, self.plan.realization.dtype)
            if obstacle:
                self.findings.add("lowering", compute, obstacle)
        if self.matmul and step_obstacle(self.matmul, self.plan.realization.dtype):
            self.findings.add("lowering", compute, step_obstacle(self.matmul, self.plan.realization.dtype))
        if any(self.buffers[part.buffer].blocks for part in compute.out):
            check_block_stores(compute, rows, self.buffers, self.findings)
            return
        if any(row.shift for row in rows):
            self.findings.add("lowering", compute, "a tile multiplies by other columns than it stores")
        parts = (*compute.a, *compute.writes, *compute.addends)
        whole = all(part.cols == (0, self.buffers[part.buffer].cols) for part in parts)
        b = self.buffers[compute.b.buffer]
        if not whole or compute.b.shape != (b.rows, b.cols) or compute.accumulate:
            message = "the kernel multiplies whole rows by a whole `b`, and adds to nothing"
            self.findings.add("lowering", compute, message)
        elif [part.shape[0] for part in compute.a] != [part.shape[0] for part in compute.out]:
            self.findings.add("lowering", compute, "`a` and `out` are not cut alike")
        else:
            places = [
                (OWN_SHARD if self.buffers[a.buffer].home == INPUT else WORKSPACE, a.rows[0], out)
                for a, out in zip(compute.a, compute.out, strict=True)
            ]
            self._check_rows(compute, MULTIPLY, rows, places)

    def _check_reduce(self, reduce: Reduce, rows: list[TileRow]) -> None:
        """Check the tiles of a Reduce: their rows, homes and dtypes."""
        regions = (*reduce.operands, reduce.out)
        if any(part.cols != (0, self.buffers[part.buffer].cols) for part in regions):
            self.findings.add("lowering", reduce, "the kernel adds whole rows")
        if any(self.buffers[part.buffer].home in (INPUT, OUTPUT) for part in reduce.operands):
            self.findings.add("lowering", reduce, "the kernel adds what lies in the workspace")
        if self.plan.dtype_of(reduce.operands[0].buffer) not in (self.plan.dtype_of(reduce.out.buffer), SUM_DTYPE):
            self.findings.add("lowering", reduce, f"its first operand is neither of its dtype nor in {SUM_DTYPE}")
        self._check_rows(reduce, REDUCE, rows, [(WORKSPACE, 0, reduce.out)])

    def _note_addend_dtypes(self, operands: dict[str, set[str]], parts: tuple[Region, ...]) -> None:
        """Note the dtypes of the parts: a kernel reads addends in the dtype that it stores."""
        dtypes = (self.plan.dtype_of(part.buffer) for part in parts)
        operands.setdefault("dtype of sums", set()).update(dtypes)

    def _tiles(self, source: int, source_row: int, out: Region) -> Iterator[LoweredRows]:
        """Yield the tiles of a rectangle, each whole (not cut along columns)."""
        for row in range(*out.rows, self.block_m):
            for col in range(*out.cols, self.block_n):
                width = narrow_width(out.cols[1] - col, self.matmul) if self.matmul else 0
                yield row, min(row + self.block_m, out.rows[1]), col, source, source_row + row - out.rows[0], width

    def _check_rows(
        self, operation: Operation, kind: int, rows: list[TileRow], places: list[tuple[int, int, Region]]
    ) -> None:
        """Compare rows with the tiles of the result. places: source, its first row and rectangle, of each part of the
        result."""
        if any(row.kind != kind for row in rows):
            self.findings.add("lowering", operation, "a tile is of the other kernel")
        heights, widths = zip(*(out.shape for _, _, out in places), strict=True)
        count = sum(
            -(-height // self.block_m) * -(-width // self.block_n)
            for height, width in zip(heights, widths, strict=True)
        )
        most = self.matmul.split_n * count if self.matmul else count
        if not count <= len(rows) <= most:
            self.findings.add("lowering", operation, f"the table has {len(rows)} tiles; its result is {count}")
            return
        actual = [(row.row, row.row_end, row.col, row.source, row.source_row, row.width) for row in rows]
        expected = self._split_missing_tiles({tile for place in places for tile in self._tiles(*place)}, set(actual))
        wrong = set(actual) ^ expected
        if wrong:
            row, row_end, col, source, source_row, _ = min(wrong)
            side = "lacks" if min(wrong) in expected else "has"
            where = f"rows [{row}:{row_end}] from column {col}, read from {'workspace' if source else 'own shard'}"
            self.findings.add("lowering", operation, f"the table {side} a tile of {where} row {source_row}")
        elif len(set(actual)) != len(actual):
            self.findings.add("lowering", operation, "the table has a tile twice")

    def _split_missing_tiles(self, tiles: set[LoweredRows], actual: set[LoweredRows]) -> set[LoweredRows]:
        """Return the tiles, with missing whole ones cut into all their boxes if they may be cut."""
        part_n = self.matmul.part_n if self.matmul else 0
        if not part_n:
            return tiles
        cut = {tile for tile in tiles - actual if not tile[5]}
        parts = {
            (row, row_end, start, source, source_row, part_n)
            for row, row_end, col, source, source_row, _ in cut
            for start in range(col, col + self.block_n, part_n)
        }
        return tiles - cut | parts


def _slices_only(tiles: list[list[TileRow]]) -> Iterator[list[TileRow]]:
    """Yield for each operation its slices; none if it is not a Put."""
    return ([row for row in rows if row.kind == COPY] for rows in tiles)


def _note_operands(compute: Compute, buffers: dict[str, Buffer], operands: dict[str, set[str]], out: str) -> None:
    """Add the buffers of a Compute by role to `operands`: a kernel has one pointer for each role."""
    for part in compute.a:
        role = "own shard" if buffers[part.buffer].home == INPUT else "workspace"
        operands.setdefault(role, set()).add(part.buffer)
    for part in compute.out:
        operands.setdefault(out, set()).add(part.buffer)
    for part in compute.copies:
        operands.setdefault("place of sums at peers", set()).add(part.buffer)
    for part in compute.scales:
        role = "scales of own rows" if buffers[part.buffer].home == INPUT else "scales of rows"
        operands.setdefault(role, set()).add(part.buffer)
    if compute.addends:
        operands.setdefault("number of addends", set()).add(str(len(compute.addends)))


def signal_fields(row: TileRow) -> tuple[int, int, int, int, int, int]:
    return row.wait_lo, row.wait_hi, row.wait_count, row.signal, row.also, row.also_count
