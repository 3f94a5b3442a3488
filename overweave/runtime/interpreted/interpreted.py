"""The interpreter depth: the actual portable kernels, several programs at once, beside the copies of the Plan.

Copies and library operations run as at library depth; each kernel queue is one launch in a thread of its own, with its
tile table, and signals are single counters that kernels add to atomically. A kernel's wait ends when the abort word is
set, which is this loop's to do: the interpreter has no device clock to bound it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from overweave.errors import InputError
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.epilogue import BIAS, GATE, NORM_WEIGHT, RESIDUAL, SCALE_W, SCALE_X, Z
from overweave.ir.plan import COPY_KERNEL, PACKED_KERNEL, REDUCE_KERNEL, TILE_KERNEL, Plan
from overweave.ir.schedule import INPUT, Compute, Reduce, ReducePut
from overweave.ir.tile_order import outputs, share_places
from overweave.memory.cuda.shares import Shares, share_numbers
from overweave.memory.host.heap import ABORT, COMPLETED
from overweave.memory.layout import REPORT_WORDS, SIGNAL_STRIDE_WORDS
from overweave.memory.lower import refuse_permuted, sums_first, widths_of
from overweave.memory.packed_layout import lay_out_packed
from overweave.runtime import interpreter
from overweave.runtime.host.agenda import Agenda, Step
from overweave.runtime.host.beside import Beside, IsDone
from overweave.runtime.host.emulate import HostCall

interpreter.repair()

# Behind the repair: importing a kernel decorates it, for interpreting or for compiling.
from overweave.kernels.arguments import AfterSums, SignalWords, TileQueue  # noqa: E402
from overweave.kernels.copy import copy_kernel  # noqa: E402
from overweave.kernels.matmul import matmul_kernel  # noqa: E402
from overweave.kernels.reduction import reduction_kernel  # noqa: E402
from overweave.memory.device.signals import TRACE_COLUMNS  # noqa: E402
from overweave.runtime.gpu.kernels.matmul_call import Operands, Protocol, portable_arguments  # noqa: E402
from overweave.runtime.gpu.kernels.peers import Peers  # noqa: E402
from overweave.runtime.gpu.kernels.tile_call import Summing, copy_arguments, reduction_arguments  # noqa: E402
from overweave.runtime.interpreted.packed import exchange_packed  # noqa: E402
from overweave.runtime.interpreted.skinny import multiply_few_rows  # noqa: E402

PROGRAMS = 3  # of one grid: enough to overlap and to race, few enough for two cores
_ROW_BYTES = 16  # bulk-tensor rows start at multiples of this
_COPIED_WORDS = 256  # int32 at a time: several turns even for small chunks; there are no bulk copies here
_CLAIMS = {TILE_KERNEL: 0, REDUCE_KERNEL: 1, COPY_KERNEL: 2}


class InterpretedCall(HostCall):
    """One call of a plan on one rank, its kernels interpreted."""

    @staticmethod
    def check(plan: Plan) -> None:
        """Rows of every matrix that a kernel loads in bulk must start at multiples of 16 bytes. Raises InputError."""
        problem, config = plan.problem, plan.realization.matmul
        if not _kernel_queues(plan):
            return
        refuse_permuted(plan.schedule)
        if config is not None and config.kernel != "portable":
            raise InputError(f"interpret {plan.name}", f"it names the {config.kernel} kernel", "Name the portable one")
        for name, extent in (("k", problem.k), *(("n", width) for width in problem.widths)):
            if extent * ITEMSIZE_BYTES[problem.dtype] % _ROW_BYTES:
                cure = f"Pad {name} to a multiple of {_ROW_BYTES // ITEMSIZE_BYTES[problem.dtype]}"
                raise InputError(f"run the kernels of {plan.name}", f"{name}={extent} of {problem.dtype}", cure)

    def make_agenda(self) -> Agenda:
        """A kernel's queue is one step."""
        return Agenda.of(self.plan.schedule, self.group.rank, frozenset(_kernel_queues(self.plan)))

    def prepare(self) -> None:
        """The arrays that come with every kernel that waits (memory/device/signals.py)."""
        slot, rank, ranks = self.slot, self.group.rank, self.group.world_size
        slot.atomic_add = interpreter.atomic_add
        self._words = slot.heap.word_lines(rank)
        self._words[ABORT] = 0
        self._report = torch.zeros(REPORT_WORDS, dtype=torch.int32)
        peers = [slot.heap.word_address(peer) for peer in range(ranks)]
        self._limits = torch.tensor([0, self._report.data_ptr(), *peers])
        self._claims = torch.zeros(len(_CLAIMS) + 1, dtype=torch.int32)
        self._claimed = 0
        self._launched = Beside()
        lines = max(slot.layout.signals, 1) * SIGNAL_STRIDE_WORDS
        # A view of the own signals as a tensor; a plan without signals gets a line that nobody reads.
        signals = slot.heap.signal_lines(rank, slot.index)[:lines] if slot.layout.signals else None
        self._protocol = [
            torch.zeros(lines, dtype=torch.int32) if signals is None else torch.frombuffer(signals, dtype=torch.int32),
            torch.frombuffer(self._words, dtype=torch.int32)[: (COMPLETED + ranks) * SIGNAL_STRIDE_WORDS],
            self._limits,
        ]

    def begin_step(self, step: Step) -> IsDone | None:
        """Launches a kernel in a thread; everything else as at library depth."""
        if not step.is_kernel and self.plan.realization.skinny and isinstance(step.operations[0], Compute):
            return self.beside(partial(multiply_few_rows, self.plan.realization.skinny, step.operations[0], self.view))
        if not step.is_kernel:
            return super().begin_step(step)
        engine = self.plan.realization.engine_of(step.queue)
        if engine == PACKED_KERNEL:
            space = self.workspace.packed(lay_out_packed(self.plan).half_bytes, self.timeout_s)
            words, limits = self._protocol[1:]
            caller, tensors = (self.group.rank, (words, limits)), dict(self.tensors)
            return self.beside(lambda: exchange_packed(self.plan, tensors, space, self.view, caller))
        rows = self.plan.tile_order(self.group.rank, step.queue).rows
        if not rows:
            return None
        launch = {TILE_KERNEL: self._multiply, REDUCE_KERNEL: self._reduce, COPY_KERNEL: self._copy}[engine]
        table = torch.tensor(rows, dtype=torch.int32)
        claims = self._claims[_CLAIMS[engine] :]
        return self.beside(lambda: launch(step, table, claims, (min(PROGRAMS, len(rows)),)))

    def beside(self, work: Callable[[], None]) -> IsDone:
        """Runs a launch in a thread of its own; what it raises is raised by whoever asks whether it is done."""
        return self._launched.start(work)

    def has_moved(self) -> bool:
        """Whether a kernel has claimed another tile."""
        before, self._claimed = self._claimed, int(self._claims.sum())
        return self._claimed != before

    def give_up(self) -> None:
        """Sets the abort word, which every wait of our kernels polls, and waits for the kernels to end."""
        if hasattr(self, "_words"):
            self._words[ABORT] = 1
            self._launched.join()

    def _multiply(self, step: Step, table: Tensor, claims: Tensor, grid: tuple[int]) -> None:
        problem, config = self.plan.problem, self.plan.realization.matmul
        assert config is not None
        computes = [operation for operation in step.operations if isinstance(operation, Compute)]
        epilogue = problem.of_tiles(any(compute.finishes for compute in computes))
        sides = {
            self.plan.schedule.buffer(region.buffer).home == INPUT: region.buffer
            for compute in computes
            for region in compute.a
        }
        weights = self.plan.schedule.weights
        buffers = [outputs(self.plan.schedule, self.group.rank, name) for name in weights]
        scales = {part.buffer for compute in computes for part in compute.scales} - {SCALE_X}
        operands = Operands(
            a_shard=_row_major(self.tensors[sides[True]]) if True in sides else None,
            a_workspace=self.slot.buffer(sides[False], self.group.rank) if False in sides else None,
            b=self._factor(weights[0]),
            out=self._matrix(buffers[0][0]),
            more=tuple(
                (self._factor(name), self._matrix(of_weight[0]))
                for name, of_weight in zip(weights[1:], buffers[1:], strict=True)
            ),
            b_is_transposed=problem.b_is_transposed,
            bases=None,
            bias=self.tensors.get(BIAS),
            residual=self.tensors.get(RESIDUAL),
            scale_x=self.tensors.get(SCALE_X),
            scale_w=self.tensors.get(SCALE_W),
            scales=next((self._matrix(name) for name in scales), None),
            gate=self._factor(GATE) if problem.epilogue.gate else None,
            epilogue=epilogue,
            total=self._matrix(buffers[0][1]) if len(buffers[0]) > 1 else None,
            addends=self._addends(computes),
            peers=self._peers(computes),
        )
        places = share_places(self.plan.tile_order(self.group.rank, step.queue).rows)
        shares = Shares.allocate(places, share_numbers(config, epilogue), table.device) if places else None
        queue, words = self._tiles(step.queue, table, claims)
        protocol = Protocol(
            *queue[:2], *words[:3], queue.trace, words.world_size, self.stopwatch is not None, shares=shares
        )
        matmul_kernel[grid](*portable_arguments(config, operands, protocol))
        assert shares is None or not shares.arrivals.any(), "the next launch finds the counters at zero"

    def _peers(self, computes: list[Compute]) -> Peers | None:
        """Of each rank, the own one first: its signals, and how far behind the own slot it lies. Behind them, if sums
        go to every rank, where those of peers lie here (kernels/stored.py).
        """
        rank, ranks = self.group.rank, self.group.world_size
        if all(compute.stored_at == {rank} for compute in computes):
            return None
        buffer = next(out.buffer for compute in computes for out in compute.writes if out.rank != rank)
        heap, index = self.slot.heap, self.slot.index
        order = [(rank + steps) % ranks for steps in range(ranks)]
        lie = [self.slot.buffer(buffer, one).data_ptr() for one in order]
        signals = [heap.signal_address(one, index, 0) if self.slot.layout.signals else 0 for one in order]
        places = [[first, place - lie[0]] for first, place in zip(signals, lie, strict=True)]
        spread = [self.slot.buffer(copy.buffer, rank) for compute in computes for copy in compute.copies][:1]
        behind = [[sums.data_ptr(), 0] for sums in spread]
        distances = tuple(distance for _, distance in places[1:])
        return Peers(torch.tensor(places + behind), distances, next(iter(spread), None))

    def _factor(self, weight: str) -> Tensor:
        """A weight `[k, n]` that lies in memory as bulk loads want it."""
        matrix = self.tensors[weight]
        return _row_major(matrix.t()).t() if self.plan.problem.b_is_transposed else _row_major(matrix)

    def _addends(self, computes: list[Compute]) -> Tensor | None:
        """For each Compute, where row 0 of its output's buffer would lie beside each addend; None if there are none."""
        width = max(len(compute.addends) for compute in computes)
        addresses = torch.zeros((len(computes), width), dtype=torch.int64)
        for row, compute in zip(addresses, computes, strict=True):
            for index, region in enumerate(compute.addends):
                addend = self.view(region)
                row[index] = addend.data_ptr() - compute.out[0].rows[0] * addend.stride(0) * addend.element_size()
        return addresses if width else None

    def _reduce(self, step: Step, table: Tensor, claims: Tensor, grid: tuple[int]) -> None:
        config = self.plan.realization.reduction
        assert config is not None
        reduces = [operation for operation in step.operations if isinstance(operation, Reduce)]
        widths = width, _, told = widths_of(reduces)
        operands = torch.zeros((len(reduces), width + 1 + told), dtype=torch.int64)
        for row, reduce in zip(operands, reduces, strict=True):
            for index, region in enumerate(reduce.operands):
                row[index] = self.view(region).data_ptr()
            row[width] = 0 if reduce.out.buffer in self.tensors else self.view(reduce.out).data_ptr()
            for index, notify in enumerate(reduce.notifies, start=width + 1):
                row[index] = self.slot.heap.signal_address(notify.rank, self.slot.index, 0)
        callers = (reduce.out.buffer for reduce in reduces if reduce.out.buffer in self.tensors)
        out = self._matrix(next(callers, reduces[0].out.buffer))
        cols = self.plan.schedule.buffer(reduces[0].out.buffer).cols
        norm, names = self.plan.problem.norm, (BIAS, RESIDUAL, NORM_WEIGHT, Z)
        how = Summing(
            traced=self.stopwatch is not None,
            after=AfterSums(*(self.tensors.get(name) for name in names)),
            eps=norm.eps if norm else 0.0,
            sum_first=sums_first(self.plan.schedule, self.plan.realization.dtype, reduces),
            epilogue=self.plan.problem.of_sums.bits,
        )
        arguments = [operands, out, *self._tiles(step.queue, table, claims), cols]
        reduction_kernel[grid](*reduction_arguments(config, arguments, widths, how))

    def _copy(self, step: Step, table: Tensor, claims: Tensor, grid: tuple[int]) -> None:
        targets = torch.zeros((len(step.operations), 2), dtype=torch.int64)
        source, row_words = torch.zeros(4, dtype=torch.int32), 1
        adds = any(isinstance(move, ReducePut) for move in step.operations)
        for row, move in zip(targets, step.operations, strict=True):
            for origin, target in zip(getattr(move, "sources", ()), move.writes, strict=True):
                row[0] = self.slot.buffer(target.buffer, target.rank).data_ptr()
                row[1] = self.slot.heap.signal_address(target.rank, self.slot.index, 0)
                source = _row_major(self._matrix(origin.buffer))
                row_words = source.shape[1] * source.element_size() // _ROW_BYTES
        words = source.contiguous() if adds else source.contiguous().view(torch.int32)
        arguments = [targets, words, *self._tiles(step.queue, table, claims), row_words]
        copy_kernel[grid](*copy_arguments(arguments, _COPIED_WORDS, False, adds, self.stopwatch is not None))

    def _tiles(self, queue: str, table: Tensor, claims: Tensor) -> tuple[TileQueue, SignalWords]:
        """The tiles of a kernel, and what waits and signals."""
        tiles = TileQueue(table, claims, self._trace(queue, len(table)), len(table))
        signals, words, limits = self._protocol
        return tiles, SignalWords(signals, words, limits, self.group.world_size)

    def _trace(self, queue: str, tiles: int) -> Tensor:
        """Where a kernel writes when it claimed, began and stored each tile, if anybody wants to know."""
        if self.stopwatch is None:
            return torch.zeros(1, dtype=torch.int64)
        self.stopwatch.programs = PROGRAMS
        trace = self.stopwatch.tables[queue] = torch.zeros((tiles, TRACE_COLUMNS.value), dtype=torch.int64)
        return trace

    def _matrix(self, buffer: str) -> Tensor:
        return self.tensors[buffer] if buffer in self.tensors else self.slot.buffer(buffer, self.group.rank)


def _kernel_queues(plan: Plan) -> list[str]:
    engines = {queue.name: plan.realization.engine_of(queue.name) for queue in plan.schedule.queues}
    return [queue for queue, engine in engines.items() if engine in (*_CLAIMS, PACKED_KERNEL)]


def _row_major(matrix: Tensor) -> Tensor:
    """The matrix with rows one behind the other at multiples of 16 bytes, copied if need be."""
    aligned = matrix.data_ptr() % _ROW_BYTES == 0 and matrix.stride(0) * matrix.element_size() % _ROW_BYTES == 0
    return matrix if matrix.stride(1) == 1 and aligned else matrix.clone(memory_format=torch.contiguous_format)
