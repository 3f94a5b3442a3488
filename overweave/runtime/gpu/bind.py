"""The kernels of one plan, compiled, loaded and bound to one slot of a workspace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from triton import next_power_of_2

from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.epilogue import BIAS, GATE, NORM_WEIGHT, RESIDUAL, SCALE_W, SCALE_X, Z
from overweave.ir.plan import AUTHOR_KERNEL, COPY_KERNEL, REDUCE_KERNEL, TILE_KERNEL, Engine, Plan, numbered
from overweave.ir.schedule import INPUT, OUTPUT, Buffer, Compute, Operation, Reduce, ReducePut
from overweave.ir.tile_order import outputs, share_places
from overweave.ir.words import COPY_WORD_BYTES
from overweave.kernels.arguments import AfterSums
from overweave.memory.cuda.shares import share_numbers
from overweave.memory.cuda.workspace import Slot, Workspace
from overweave.memory.device.signals import TRACE_COLUMNS
from overweave.memory.lower import (
    SlotAddresses,
    addend_addresses,
    addend_shifts,
    copy_targets,
    peer_places,
    reduction_operands,
    sums_first,
    widths_of,
    write_steps,
)
from overweave.memory.steps import WaitStep
from overweave.runtime.gpu.head import head_of
from overweave.runtime.gpu.kernels import matmul_call
from overweave.runtime.gpu.kernels.arguments import Moving, moving, table_tensor
from overweave.runtime.gpu.kernels.kernels import copy_launch, reduction_launch, told_addresses
from overweave.runtime.gpu.kernels.matmul import hopper_strip, matmul_launch
from overweave.runtime.gpu.kernels.matmul_call import Operands
from overweave.runtime.gpu.kernels.peer_store_throttle import pace_ns
from overweave.runtime.gpu.kernels.peers import Peers
from overweave.runtime.gpu.kernels.tile_call import Summing

Tensors = Mapping[str, torch.Tensor]
Enqueue = Callable[[int, dict[str, int]], None]


def own_instance(plan: Plan, addresses: SlotAddresses, slot: Slot, name: str) -> torch.Tensor:
    """A rank's own instance of a workspace buffer."""
    buffer = plan.schedule.buffer(name)
    dtype = getattr(torch, buffer.dtype or plan.realization.dtype)
    return slot.view(addresses.layout.buffers[name], (buffer.rows, buffer.cols), dtype)


class Binding(NamedTuple):
    """What a kernel is bound to. arrays: the slot's signals, the workspace's words and limits. example: the caller's
    tensors of one call, by buffer."""

    plan: Plan
    workspace: Workspace
    addresses: SlotAddresses
    slot: Slot
    arrays: list[torch.Tensor]
    example: Tensors

    def own(self, name: str) -> torch.Tensor:
        """The own instance of a workspace buffer."""
        return own_instance(self.plan, self.addresses, self.slot, name)


class AuthorTiles(Protocol):
    """An author's kernel that computes the tiles of a plan (runtime/gpu/authored.py)."""

    def bind(self, binding: Binding, queue: str) -> Enqueue:
        """What launches it for the tiles of its queue."""

    def all_started(self, binding: Binding) -> WaitStep | None:
        """What a stream waits for until every block has an SM; None of a kernel whose blocks take tile after tile."""


class SlotKernels:
    """begin, tiles, reduce, copy: each enqueues one kernel of the plan on a stream; all but the first take addresses
    by name. copies_started: what a stream waits for until the copy kernel of this call has as many tiles claimed as it
    has programs; None without one. tiles_started: the same of an author's kernel, where sums beside it wait for that.
    arrays: the slot's signals, the workspace's words and limits.

    traces: for a traced plan, queue -> int64 `[tiles, TRACE_COLUMNS]`, filled by each call. before_sums: a library call
    right before the sums, whose peers they tell.
    """

    def __init__(
        self,
        plan: Plan,
        workspace: Workspace,
        addresses: SlotAddresses,
        slot: Slot,
        example: Tensors,
        traced: bool,
        before_sums: Operation | None = None,
        author: AuthorTiles | None = None,
    ) -> None:
        self._plan, self._workspace, self._addresses = plan, workspace, addresses
        self._slot, self._rank, self._example, self._traced = slot, workspace.group.rank, example, traced
        self._before_sums = before_sums
        self.traces: dict[str, torch.Tensor] = {}
        self.begin, self._signals, self._words = head_of(workspace, slot, addresses.layout.signals)
        self.arrays = [self._signals, self._words, workspace.limits]
        self.copies_started: WaitStep | None = None
        binding = Binding(plan, workspace, addresses, slot, self.arrays, example)
        self.tiles_started = author.all_started(binding) if author else None
        if author:
            self.tiles = self._bound(AUTHOR_KERNEL, partial(author.bind, binding))
        else:
            self.tiles = self._bound(TILE_KERNEL, self._multiply)
        self.reduce = self._bound(REDUCE_KERNEL, self._reduce)
        self.copy = self._bound(COPY_KERNEL, self._copy)
        # The caller's tensors are not ours to keep: launches know where later ones lie. Nor is a plan's table of tiles,
        # which the device has now, and which is larger in Python.
        del self._example, self._plan

    def _bound(self, engine: Engine, make: Callable[[str], Enqueue]) -> Enqueue:
        """The launch of the plan's queue for this kernel, if it has tiles there."""
        for queue in self._plan.schedule.queues:
            if self._plan.realization.engine_of(queue.name) == engine:
                if self._plan.tile_order(self._rank, queue.name).rows:
                    return make(queue.name)
        return lambda stream, addresses: None

    def _protocol(self, queue: str, counter: int) -> matmul_call.Protocol:
        workspace = self._workspace
        rows = self._plan.tile_order(self._rank, queue).rows
        trace_size = len(rows) if self._traced else 1
        trace = torch.zeros((trace_size, TRACE_COLUMNS.value), dtype=torch.int64, device=workspace.device)
        self.traces[queue] = trace
        return matmul_call.Protocol(
            table=table_tensor(rows, workspace.device),
            claims=workspace.claims[counter:],
            signals=self._signals,
            words=self._words,
            limits=workspace.limits,
            trace=trace,
            world_size=workspace.group.world_size,
            traced=self._traced,
            sms_beside=self._plan.sms_beside,
        )

    def _multiply(self, queue: str) -> Enqueue:
        config = self._plan.realization.matmul
        assert config is not None
        computes = [op for op in self._plan.schedule.of_rank(self._rank) if isinstance(op, Compute)]
        sides = {self._buffer(compute.a[0].buffer) for compute in computes}
        shard = next((buffer for buffer in sides if buffer.home == INPUT), None)
        gathered = next((buffer for buffer in sides if buffer.home != INPUT), None)
        weights = self._plan.schedule.weights
        outs = {name: [self._buffer(out) for out in outputs(self._plan.schedule, self._rank, name)] for name in weights}
        out, total = outs[weights[0]][0], next(iter(outs[weights[0]][1:]), None)
        more = [(name, outs[name][0]) for name in weights[1:]]
        movers = {"b": weights[0]} | ({"a_shard": shard.name} if shard else {})
        movers |= {"out": out.name} if out.home == OUTPUT else {}
        for index, (name, product) in enumerate(more, start=1):
            movers |= {numbered("b", index): name, numbered("out", index): product.name}
        movers |= {"total": total.name} if total and total.home == OUTPUT else {}
        epilogue = self._plan.problem.of_tiles(any(compute.finishes for compute in computes))
        movers |= {"b.1" if name == GATE else name: name for name in epilogue.inputs}
        columns = {self._buffer(part.buffer) for compute in computes for part in compute.scales}
        gathered_scales = next((buffer for buffer in columns if buffer.home != INPUT), None)
        movers |= {buffer.name: buffer.name for buffer in columns if buffer.home == INPUT}
        bases, protocol = {side: moving(self._example[name]) for side, name in movers.items()}, self._protocol(queue, 0)
        operands = Operands(
            a_shard=self._example[shard.name] if shard else None,
            a_workspace=self._own(gathered) if gathered else None,
            b=self._example[weights[0]],
            more=tuple((self._example[name], self._instance(product)) for name, product in more),
            out=self._instance(out),
            b_is_transposed=self._plan.problem.b_is_transposed,
            bases=bases,
            bias=self._example[BIAS] if epilogue.bias else None,
            residual=self._example[RESIDUAL] if epilogue.residual else None,
            scale_x=self._example[SCALE_X] if SCALE_X in movers else None,
            scales=self._own(gathered_scales) if gathered_scales else None,
            scale_w=self._example.get(SCALE_W),
            gate=self._example[GATE] if epilogue.gate else None,
            epilogue=epilogue,
            total=self._instance(total) if total else None,
            addends=self._addends(queue),
            addend_rows=self._addend_rows(queue),
            peers=self._peers(queue, computes, protocol.table.shape[0] / protocol.programs()),
        )
        places, numbers = share_places(self._plan.tile_order(self._rank, queue).rows), share_numbers(config, epilogue)
        shares = self._workspace.shares.get(places, numbers) if places else None
        launch = matmul_launch(config, operands, replace(protocol, shares=shares))
        followed = [(bases[side], name) for side, name in movers.items()]

        def enqueue(stream: int, addresses: dict[str, int]) -> None:
            for base, name in followed:
                base.address = addresses[name]
            launch(stream)

        return enqueue

    def _reduce(self, queue: str) -> Enqueue:
        config, workspace = self._plan.realization.reduction, self._workspace
        assert config is not None
        rows = reduction_operands(self._addresses, self._rank, queue)
        operands = torch.tensor(rows, dtype=torch.int64, device=workspace.device)
        reduces = [op for op in self._plan.schedule.of_rank(self._rank) if isinstance(op, Reduce) and op.queue == queue]
        outs = [self._buffer(reduce.out.buffer) for reduce in reduces]
        stored = next((out for out in outs if out.home == OUTPUT), outs[0])  # others' addresses stand in the table
        protocol, out = self._protocol(queue, 1), moving(self._instance(stored))
        tiles, cols = protocol.table.shape[0], stored.cols
        norm, epilogue = self._plan.problem.norm, self._plan.problem.of_sums
        moved = {name: moving(self._example[name]) for name in ((*norm.inputs, Z) if norm else epilogue.inputs)}
        arguments: list[Any] = [operands, out, protocol.queue, protocol.signal_words, cols]
        after = AfterSums(*(moved.get(name) for name in (BIAS, RESIDUAL, NORM_WEIGHT, Z)))
        sum_first = sums_first(self._plan.schedule, self._plan.realization.dtype, reduces)
        how = Summing(self._traced, after, norm.eps if norm else 0.0, sum_first, epilogue.bits, self._ready())
        launch = reduction_launch(config, arguments, tiles, widths_of(reduces), how)
        if stored.home == OUTPUT:
            moved[stored.name] = out

        def enqueue(stream: int, addresses: dict[str, int]) -> None:
            for name, tensor in moved.items():
                tensor.address = addresses[name]
            launch(stream)

        return enqueue

    def _ready(self) -> torch.Tensor | None:
        """Whom the reduction tells when it begins."""
        if self._before_sums is None:
            return None
        told = tuple(step.address for step in write_steps(self._addresses, self._before_sums))
        return told_addresses(told, next_power_of_2(len(told)), self._workspace.device)

    def _copy(self, queue: str) -> Enqueue:
        config, device = self._plan.realization.copy, self._workspace.device
        assert config is not None
        targets = torch.tensor(copy_targets(self._addresses, self._rank, queue), dtype=torch.int64, device=device)
        buffer, protocol = self._pushed(queue), self._protocol(queue, 2)
        tensor = self._workspace.state if buffer is None else self._instance(buffer)
        row_words = 1 if buffer is None else buffer.cols * tensor.itemsize // COPY_WORD_BYTES
        adds = any(isinstance(op, ReducePut) and op.queue == queue for op in self._plan.schedule.of_rank(self._rank))
        dtype = tensor.dtype if adds else torch.int32
        source, tiles = Moving(tensor.data_ptr(), dtype), protocol.table.shape[0]
        self.copies_started = WaitStep(protocol.claims.data_ptr(), min(config.programs, tiles))
        arguments: list[Any] = [targets, source, protocol.queue, protocol.signal_words, row_words]
        launch = copy_launch(config, arguments, tiles, self._traced, adds)
        name = buffer.name if buffer is not None and buffer.home in (INPUT, OUTPUT) else None

        def enqueue(stream: int, addresses: dict[str, int]) -> None:
            if name is not None:
                source.address = addresses[name]
            launch(stream)

        return enqueue

    def _pushed(self, queue: str) -> Buffer | None:
        """The one buffer that the queue's operations read; None if they only wait."""
        moves = (op for op in self._plan.schedule.of_rank(self._rank) if op.queue == queue)
        return next((self._buffer(part.buffer) for move in moves for part in move.reads), None)

    def _buffer(self, name: str) -> Buffer:
        return self._plan.schedule.buffer(name)

    def _instance(self, buffer: Buffer) -> torch.Tensor:
        """The own instance of a buffer, the caller's or the workspace's."""
        return self._example[buffer.name] if buffer.home in (INPUT, OUTPUT) else self._own(buffer)

    def _addends(self, queue: str) -> torch.Tensor | None:
        rows = addend_addresses(self._addresses, self._rank, queue)
        return torch.tensor(rows, dtype=torch.int64, device=self._workspace.device) if any(rows) else None

    def _peers(self, queue: str, computes: list[Compute], waves: float) -> Peers | None:
        """Where tiles store at other ranks, if any do. waves: in which they run."""
        rows = peer_places(self._addresses, self._rank, queue)
        if not rows:
            return None
        spread = next((copy.buffer for compute in computes for copy in compute.copies), None)
        own = self._own(self._buffer(spread)) if spread else None
        config = self._plan.realization.matmul
        assert config is not None
        strip_bytes = prod(hopper_strip(config)) * ITEMSIZE_BYTES[self._plan.problem.moved_dtype]
        pace = pace_ns(self._plan.problem, computes, waves / len(rows), strip_bytes)
        behind = [own.data_ptr() if own is not None else 0, pace]
        places = torch.tensor([*rows, behind], dtype=torch.int64, device=self._workspace.device)
        return Peers(places, tuple(distance for _, distance in rows[1:]), own)

    def _addend_rows(self, queue: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where single addends lie, if all lie in one own buffer, and how much further in that than the result does."""
        shifts = addend_shifts(self._plan.schedule, self._rank, queue)
        if shifts is None:
            return None
        buffer, rows = shifts
        device = self._workspace.device
        return self._own(self._buffer(buffer)), torch.tensor(rows, dtype=torch.int64, device=device)

    def _own(self, buffer: Buffer) -> torch.Tensor:
        return own_instance(self._plan, self._addresses, self._slot, buffer.name)
