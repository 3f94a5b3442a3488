"""The kernels of a plan on one rank: what each is given of the plan, of the caller's tensors and of a workspace.

The same on a GPU and under the interpreter. Tables are made once; the caller's tensors may move from call to call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, TypeVar

import torch

from overweave.ir.blocks import stored_shape
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.plan import COPY_KERNEL, REDUCE_KERNEL, TILE_KERNEL, W_REST, X_REST, Engine, MatmulConfig, Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import INPUT, OUTPUT, Compute, Operation, Reduce, ReducePut, Region
from overweave.ir.tile_order import outputs, share_places
from overweave.ir.words import COPY_WORD_BYTES, LEAST_WAVES
from overweave.kernels.added import added_operands, code_of
from overweave.kernels.arguments import LaunchTiles
from overweave.memory.device.signals import TRACE_COLUMNS
from overweave.memory.heap import Heap
from overweave.memory.layout import lay_out
from overweave.memory.lower import (
    SlotAddresses,
    addend_addresses,
    addend_shifts,
    copy_targets,
    peer_places,
    reduction_operands,
    sums_first,
    widths_of,
)
from overweave.memory.shares import share_numbers
from overweave.runtime.kernel_calls.call import (
    KernelCall,
    MatrixInput,
    Moving,
    Peers,
    TileKernelArgs,
    addresses_tensor,
    as_words,
    moving,
    table_tensor,
)
from overweave.runtime.kernel_calls.matmul import Operands, hopper_strip, portable_call
from overweave.runtime.kernel_calls.protocol import ProtocolWords, signal_words
from overweave.runtime.kernel_calls.sums_and_copies import Pushes, ReductionCall, after_sums, copy_call, reduction_call

TensorsByName = Mapping[str, torch.Tensor]
MatmulCall = Callable[[MatmulConfig, Operands, TileKernelArgs], KernelCall]
Some = TypeVar("Some", bound=Operation)
# Counters of claimed tiles; any other kernel's is the first.
COUNTERS: dict[Engine, int] = {REDUCE_KERNEL: 1, COPY_KERNEL: 2}


class Binding:
    """A plan bound to the memory of a workspace, as its kernels see it.

    example: the caller's tensors of one call; they are not kept. moved: their stand-ins by name, whose addresses are to
    be set before each call. sms: how many programs of a tile kernel run at once. traces: of a traced plan, queue ->
    int64 `[tiles, TRACE_COLUMNS]`, filled by each call.
    """

    def __init__(
        self,
        plan: Plan,
        workspace: ProtocolWords,
        heap: Heap,
        example: TensorsByName,
        sms: int,
        is_traced: bool = False,
    ) -> None:
        self.plan, self.workspace, self.heap, self.rank = plan, workspace, heap, workspace.group.rank
        layout = lay_out(plan.schedule, plan.realization.dtype)
        self.addresses = SlotAddresses(plan.schedule, plan.realization.dtype, layout, heap.addresses)
        self.protocol = signal_words(workspace, heap, layout.signals)
        self.moved: list[tuple[str, Moving]] = []
        self.traces: dict[str, torch.Tensor] = {}
        self.sms, self._example, self._is_traced = sms, example, is_traced

    def own(self, name: str) -> torch.Tensor:
        """The own instance of a workspace buffer, its memory as `stored_shape` says."""
        buffer = self.plan.schedule.buffer(name)
        dtype = getattr(torch, buffer.dtype or self.plan.realization.dtype)
        return self.heap.view(self.addresses.layout.buffers[name], stored_shape(buffer), dtype)

    def callers(self, name: str) -> Moving:
        """A stand-in of a tensor of the caller's."""
        stand = moving(self._example[name])
        self.moved.append((name, stand))
        return stand

    def rest(self) -> tuple[Moving, Moving] | None:
        """Of factors in two parts, the second ones."""
        return (self.callers(X_REST), self.callers(W_REST)) if X_REST in self._example else None

    def instance(self, name: str) -> MatrixInput:
        """The own instance of a buffer, the caller's or the workspace's."""
        return self.callers(name) if self.plan.schedule.buffer(name).home in (INPUT, OUTPUT) else self.own(name)

    def programs(self, tiles: int) -> int:
        """How many programs of a tile kernel there are."""
        return max(1, min(self.sms, tiles))

    def table(self, rows: object) -> torch.Tensor:
        """Addresses, on the device."""
        return addresses_tensor(rows, self.workspace.device)

    def tiles(self, queue: str) -> TileKernelArgs:
        """The tiles of a kernel's queue, and the words of the protocol."""
        rows, device = self.plan.tile_order(self.rank, queue).rows, self.workspace.device
        trace_size = len(rows) if self._is_traced else 1
        trace = self.traces[queue] = torch.zeros((trace_size, TRACE_COLUMNS.value), dtype=torch.int64, device=device)
        claims = self.claims(self.plan.realization.engine_of(queue))
        return TileKernelArgs(
            LaunchTiles(table_tensor(rows, device), claims, trace, len(rows)), self.protocol, self._is_traced
        )

    def claims(self, engine: Engine) -> torch.Tensor:
        """The counter of tiles that a kernel's programs claim."""
        return self.workspace.claims[COUNTERS.get(engine, 0) :]

    def operations(self, queue: str, kind: type[Some]) -> list[Some]:
        """Those of a kind on a queue of this rank."""
        return [one for one in self.plan.schedule.of_rank(self.rank) if one.queue == queue and isinstance(one, kind)]


def kernel_call(binding: Binding, queue: str, matmul_call: MatmulCall = portable_call) -> KernelCall | None:
    """The kernel of a queue; None if it has no tiles on this rank.

    matmul_call: of the plan's tile kernel.
    """
    if not binding.plan.tile_order(binding.rank, queue).rows:
        return None
    engine = binding.plan.realization.engine_of(queue)
    if engine == TILE_KERNEL:
        return _multiply(binding, queue, matmul_call)
    return _reduce(binding, queue) if engine == REDUCE_KERNEL else _copy(binding, queue)


def _multiply(binding: Binding, queue: str, matmul_call: MatmulCall) -> KernelCall:
    plan, schedule, config = binding.plan, binding.plan.schedule, binding.plan.realization.matmul
    assert config is not None
    computes, tiles = binding.operations(queue, Compute), binding.tiles(queue)
    epilogue = plan.problem.of_tiles(any(compute.finishes for compute in computes))
    shard, gathered = _by_home(binding, [compute.a[0] for compute in computes])
    own_scales, gathered_scales = _by_home(binding, [part for compute in computes for part in compute.scales])
    outs = {name: outputs(schedule, binding.rank, name) for name in schedule.weights}
    total = next(iter(outs[schedule.weights[0]][1:]), None)
    read = {name: binding.callers(name) for name in (*epilogue.inputs, *([own_scales] if own_scales else []))}
    more = added_operands(epilogue, read)
    read = {name: read[name] for name in read if name in Operands.__dataclass_fields__}
    addends = addend_addresses(binding.addresses, binding.rank, queue)
    shifts = addend_shifts(schedule, binding.rank, queue)
    places = share_places(plan.tile_order(binding.rank, queue).rows)
    operands = Operands(
        a_shard=binding.callers(shard) if shard else None,
        a_workspace=binding.own(gathered) if gathered else None,
        weights=tuple((binding.instance(name), binding.instance(outs[name][0])) for name in schedule.weights),
        b_is_transposed=plan.problem.b_is_transposed,
        **read,
        scale_gathered=binding.own(gathered_scales) if gathered_scales else None,
        rest=binding.rest(),
        more=more,
        epilogue=epilogue,
        total=binding.instance(total) if total else None,
        addends=binding.table(addends) if any(addends) else None,
        addend_rows=(binding.own(shifts[0]), binding.table(shifts[1])) if shifts else None,
        shares=binding.workspace.shares.get(places, share_numbers(config, epilogue)) if places else None,
        peers=_peers(binding, queue, computes, tiles.queue.tiles / binding.programs(tiles.queue.tiles)),
    )
    return matmul_call(config, operands, tiles)


def _by_home(binding: Binding, regions: list[Region]) -> tuple[str | None, str | None]:
    """Of buffers that tiles read, that of the caller and that of the workspace."""
    names = dict.fromkeys(region.buffer for region in regions)
    of_caller = {name: binding.plan.schedule.buffer(name).home == INPUT for name in names}
    first = [next((name for name in names if of_caller[name] == is_callers), None) for is_callers in (True, False)]
    return first[0], first[1]


def _peers(binding: Binding, queue: str, computes: list[Compute], waves: float) -> Peers | None:
    """Where tiles store at other ranks, if any do. waves: in which they run."""
    rows = peer_places(binding.addresses, binding.rank, queue)
    if not rows:
        return None
    problem, config = binding.plan.problem, binding.plan.realization.matmul
    assert config is not None
    spread = next((binding.own(copy.buffer) for compute in computes for copy in compute.copies), None)
    strip_bytes = prod(hopper_strip(config)) * ITEMSIZE_BYTES[problem.moved_dtype]
    pace = pace_ns(problem, computes, waves / len(rows), strip_bytes)
    places = binding.table([*rows, [0 if spread is None else spread.data_ptr(), pace]])
    return Peers(places, tuple(distance for _, distance in rows[1:]), spread)


def _reduce(binding: Binding, queue: str) -> KernelCall:
    plan, config = binding.plan, binding.plan.realization.reduction
    assert config is not None
    reduces = binding.operations(queue, Reduce)
    outs = [plan.schedule.buffer(reduce.out.buffer) for reduce in reduces]
    stored = next((out for out in outs if out.home == OUTPUT), outs[0])  # others' addresses stand in the table
    of_rows, epilogue = plan.problem.of_rows, plan.problem.of_sums
    read = {name: binding.callers(name) for name in ((*of_rows.inputs, *of_rows.makes) if of_rows else epilogue.inputs)}
    sums = ReductionCall(
        operands=binding.table(reduction_operands(binding.addresses, binding.rank, queue)),
        widths=widths_of(reduces),
        out=binding.instance(stored.name),
        cols=stored.cols,
        after=after_sums(epilogue, read),
        eps=of_rows.eps if of_rows else 0.0,
        sum_first=sums_first(plan.schedule, plan.realization.dtype, reduces),
        epilogue=code_of(epilogue),
        **_map_of(binding, reduces),
    )
    return reduction_call(config, binding.tiles(queue), sums)


def _map_of(binding: Binding, reduces: list[Reduce]) -> dict[str, Any]:
    """The map of what a kernel moves, if its blocks are permuted: of all its operands, as verify knows."""
    blocks = binding.plan.schedule.buffer(reduces[0].operands[0].buffer).blocks
    if blocks is None:
        return {}
    places = torch.tensor(blocks.places, dtype=torch.int32, device=binding.workspace.device)
    return {"cells": places, "cell": (blocks.rows, blocks.cols)}


def _copy(binding: Binding, queue: str) -> KernelCall:
    config = binding.plan.realization.copy
    moves = [one for one in binding.plan.schedule.of_rank(binding.rank) if one.queue == queue]
    assert config is not None
    targets = binding.table(copy_targets(binding.addresses, binding.rank, queue))
    adds = any(isinstance(move, ReducePut) for move in moves)
    name = next((part.buffer for move in moves for part in move.reads), None)  # the one buffer that they read
    if name is None:  # they only wait
        return copy_call(config, binding.tiles(queue), Pushes(targets, binding.workspace.state, 1))
    buffer, source = binding.plan.schedule.buffer(name), binding.instance(name)
    row_words = buffer.cols * source.dtype.itemsize // COPY_WORD_BYTES
    pushes = Pushes(targets, source if adds else as_words(source), row_words, adds)
    return copy_call(config, binding.tiles(queue), pushes)


# How far apart tiles of the Hopper kernel store their strips at peers (kernels/hopper/stored.py).

# With a strip of so many bytes from each SM so far apart, the link is full and no more.
# MEASURED: on two H200s, 16 rings (benchmarks/results/paces.h200x2.2026-11-22.txt): the quickest, or 1 % behind it
# where tiles are long; 75 ns less take up to 3 % more, 100 ns more up to 6 %.
STRIP_BYTES, PACE_NS = 2048, 700
# For each so many bytes of a row of an operand: half of what a tile takes for them, by its strips, of which one of
# 128 x 256 has 32. MEASURED: 0.69 us (STEP_US in schedules/tiles/shape.py).
STEP_BYTES, STEP_NS = 128, 10


def pace_ns(problem: Problem, computes: Iterable[Compute], waves: float, strip_bytes: int) -> int:
    """All SMs end their first tiles together, and what they load next waits for what they store: so the strips of a
    tile come no faster than the link takes them, and those of a long one are spread over half of the time that the next
    takes. waves: of tiles, in each shard. 0: as fast as they go.

    The time follows from k. It is not measured, as a tile that waits for a peer would take all the longer, and let the
    next rank wait. And there is none where it costs more than it saves. MEASURED: in turns, by an earlier rule
    (benchmarks/results/rests.h200x4.2026-11-22.txt; `campaigns.gpu_paces` times this one):

    - a shard has no second wave: the next rank of a ring waits for each tile. 286 us, and 219 without; on two, by this
      rule, 117 us and 107.
    - a sum goes to several peers: the link is the bound by then. 1,503 us, and 1,427 without; 788 and 717.
    """
    spreads = any(len(compute.copies) > 1 for compute in computes)
    if spreads or waves < LEAST_WAVES:
        return 0
    steps = problem.k * ITEMSIZE_BYTES[problem.dtype] // STEP_BYTES
    return max(PACE_NS, steps * STEP_NS) * strip_bytes // STRIP_BYTES
