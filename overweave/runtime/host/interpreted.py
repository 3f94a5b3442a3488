"""The interpreter depth of the emulation: the portable kernels, several programs at once, beside the Plan's copies.

Copies and operations of cuBLAS or NCCL run as at library depth. Each kernel queue is one launch in a thread of its own,
with its tile table, and signals are single counters that kernels add to atomically. A kernel's wait has no deadline of
its own, for lack of a device clock: the event loop sets the abort word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from overweave.errors import InputError
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.operators.forms import GATE
from overweave.ir.plan import KERNELS, PACKED_KERNEL, Plan
from overweave.ir.schedule import INPUT, OUTPUT, Compute
from overweave.memory.group import Group
from overweave.memory.heap import ranks_in_reach
from overweave.memory.host.workspace import ABORT, HostHeap
from overweave.memory.layout import REPORT_WORDS, lay_out_packed
from overweave.memory.split_k import SharedShares
from overweave.runtime.host.emulate import HostCall, IsDone, LaunchThreads, TensorsByName
from overweave.runtime.interpreted import interpreter
from overweave.runtime.scheduler import PendingStep

interpreter.repair()

# Behind the repair: importing a kernel decorates it, for interpreting or for compiling.
from overweave.runtime.kernel_calls.bind import Binding, kernel_call  # noqa: E402
from overweave.runtime.kernel_calls.call import KernelCall, control_words  # noqa: E402
from overweave.runtime.kernel_calls.packed import Caller, SkinnyOperands, packed_call, skinny_call  # noqa: E402

PROGRAMS = 3  # of one grid: enough to overlap and to race, few enough for two cores
_ROW_BYTES = 16  # bulk-tensor rows start at multiples of this
_CPU = torch.device("cpu")
# Tile sizes that give several programs, and several loop iterations of each, even of small products.
_MESSAGES = 16
_SKINNY_TILE = {"block_m": 16, "block_n": 32, "block_k": 16}
_COPIED_KIB = 1


class HostWords(NamedTuple):
    """The protocol words of one call beside those of its slot: a `ProtocolWords` (kernel_calls/call.py)."""

    group: Group
    words: HostHeap
    state: Tensor
    claims: Tensor
    limits: Tensor
    shares: SharedShares
    device: torch.device = _CPU


def host_words(group: Group, words: HostHeap, report: Tensor) -> HostWords:
    """Return zeroed local words with the symmetric ones. report: of a wait that timed out."""
    peers = [words.addresses[rank] for rank in ranks_in_reach(words.addresses, group.rank)]
    limits = torch.tensor([0, report.data_ptr(), *peers])
    state, claims = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    return HostWords(group, words, state, claims, limits, SharedShares(_CPU))


class InterpretedCall(HostCall):
    """One call of a plan on one rank, its kernels interpreted."""

    @staticmethod
    def check(plan: Plan) -> None:
        """Raise InputError unless rows of every matrix that a kernel loads by TMA start at multiples of 16 bytes."""
        problem, config = plan.problem, plan.realization.matmul
        if not _kernel_queues(plan):
            return
        if config is not None and config.kernel != "portable":
            raise InputError(f"interpret {plan.name}", f"it names the {config.kernel} kernel", "Name the portable one")
        for name, extent in (("k", problem.k), *(("n", width) for width in problem.widths)):
            if extent * ITEMSIZE_BYTES[problem.dtype] % _ROW_BYTES:
                cure = f"Pad {name} to a multiple of {_ROW_BYTES // ITEMSIZE_BYTES[problem.dtype]}"
                raise InputError(f"run the kernels of {plan.name}", f"{name}={extent} of {problem.dtype}", cure)

    @staticmethod
    def kernel_queues(plan: Plan) -> frozenset[str]:
        """Return the queues of kernels."""
        return frozenset(_kernel_queues(plan))

    def prepare(self) -> None:
        """Bind the kernels to the slot and to the protocol's words (memory/device/signals.py)."""
        self.slot.atomic_add = interpreter.atomic_add
        self._lines = self.workspace.lines(self.group.rank)
        self._lines[ABORT] = 0
        self._report = torch.zeros(REPORT_WORDS, dtype=torch.int32)
        self.words = host_words(self.group, self.workspace.words, self._report)
        self._claimed = 0
        self._launched = LaunchThreads()
        tensors = {name: self._bulk_loaded(name, tensor) for name, tensor in self.tensors.items()}
        plan, is_traced = with_small_tiles(self.plan), self.stopwatch is not None
        self.binding = Binding(plan, self.words, self.slot.heap, tensors, PROGRAMS, is_traced)
        if self.stopwatch is not None:
            self.stopwatch.tables, self.stopwatch.programs = self.binding.traces, PROGRAMS

    def begin_step(self, step: PendingStep) -> IsDone | None:
        """Launch a kernel in a thread; start other steps as at library depth."""
        (first, *_), realization = step.operations, self.binding.plan.realization
        if not step.is_kernel and realization.skinny and isinstance(first, Compute):
            factors = SkinnyOperands(*(self.memory.view(part) for part in (first.a[0], first.b, first.out[0])))
            return self.launch(skinny_call(realization.skinny, factors, self.words.shares))
        if not step.is_kernel:
            return super().begin_step(step)
        if realization.engine_of(step.queue) == PACKED_KERNEL:
            return self.launch(self._packed())
        call = kernel_call(self.binding, step.queue)
        return None if call is None else self.launch(call, PROGRAMS)

    def launch(self, call: KernelCall, most: int | None = None) -> IsDone | None:
        """Interpret a kernel; return None if it has no programs. most: programs of a kernel that claims tiles."""
        programs = call.programs if most is None else min(most, call.programs)
        if not programs:
            return None
        return self.start(lambda: call.kernel[(programs,)](*call.arguments))

    def start(self, work: Callable[[], None]) -> IsDone:
        """Run a launch in a new thread. Return a function that polls for its end, and raises what it raised."""
        return self._launched.start(work)

    def run(self, inputs: TensorsByName, outputs: TensorsByName) -> None:
        """Run as `HostCall.run`; check that kernels have left the split-K counters at zero for the next launch."""
        super().run(inputs, outputs)
        assert self.words.shares.are_unused()

    def _packed(self) -> KernelCall:
        plan = self.binding.plan
        layout, config = lay_out_packed(plan), plan.realization.packed
        assert config is not None
        space = self.workspace.packed(layout.half_bytes, self.timeout_s)
        caller = Caller(self.group.rank, (control_words(self.words), self.words.limits))
        buffers = [buffer.name for buffer in plan.schedule.buffers if buffer.home not in (INPUT, OUTPUT)]
        tensors = {**self.tensors, **{name: self.binding.workspace_buffer(name) for name in buffers}}
        return packed_call(config, plan.problem, layout, tensors, space, caller)

    def _bulk_loaded(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of the caller's as TMA requires it, copied if need be. Outputs are already so."""
        inputs = {GATE, *(buffer.name for buffer in self.plan.schedule.buffers if buffer.home == INPUT)}
        if tensor.dim() != 2 or name not in inputs:
            return tensor
        is_weight = name in (*self.plan.schedule.weights, GATE)
        if is_weight and self.plan.problem.b_is_transposed:
            return _row_major(tensor.t()).t()
        return _row_major(tensor)

    def has_progressed(self) -> bool:
        """Return whether a kernel has claimed a tile since the last call."""
        before, self._claimed = self._claimed, int(self.words.claims.sum())
        return self._claimed != before

    def abort(self) -> None:
        """Set the abort word, which every wait of our kernels polls, and wait for the kernels to end."""
        if hasattr(self, "_lines"):
            self._lines[ABORT] = 1
            self._launched.join()


def with_small_tiles(plan: Plan) -> Plan:
    """Return the plan with small tiles: kernels loop several times over small products, too."""
    realization = plan.realization
    changed = {
        "packed": realization.packed and replace(realization.packed, block=_MESSAGES),
        "skinny": realization.skinny and replace(realization.skinny, **_SKINNY_TILE),
        "copy": realization.copy and replace(realization.copy, block_kib=_COPIED_KIB),
    }
    return replace(plan, realization=replace(realization, **changed))


def _kernel_queues(plan: Plan) -> list[str]:
    engines = {queue.name: plan.realization.engine_of(queue.name) for queue in plan.schedule.queues}
    return [queue for queue, engine in engines.items() if engine in (*KERNELS, PACKED_KERNEL)]


def _row_major(matrix: Tensor) -> Tensor:
    """Return the matrix row-major, with rows at multiples of 16 bytes; copied if need be."""
    aligned = matrix.data_ptr() % _ROW_BYTES == 0 and matrix.stride(0) * matrix.element_size() % _ROW_BYTES == 0
    return matrix if matrix.stride(1) == 1 and aligned else matrix.clone(memory_format=torch.contiguous_format)
