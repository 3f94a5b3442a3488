"""Bind the kernels of a plan on one rank: their arguments from the plan, the caller's tensors and a workspace.

The same on a GPU and under the interpreter. Tables are built once; the caller's tensors may move from call to call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, TypeVar

import torch

from overweave.ir.blocks import stored_shape
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.plan import (
    COPY_KERNEL,
    COPY_WORD_BYTES,
    LEAST_WAVES,
    REDUCE_KERNEL,
    TILE_KERNEL,
    W_REST,
    X_REST,
    Engine,
    MatmulConfig,
    Plan,
)
from overweave.ir.problem import Problem
from overweave.ir.schedule import INPUT, OUTPUT, Compute, Operation, Reduce, ReducePut, Region
from overweave.ir.tile_order import outputs
from overweave.kernels.arguments import LaunchTiles
from overweave.kernels.epilogue import epilogue_code, rows_code
from overweave.memory.device.signals import TRACE_COLUMNS
from overweave.memory.heap import Heap
from overweave.memory.layout import lay_out
from overweave.memory.lower import (
    WorkspaceAddresses,
    addend_addresses,
    addend_row_shifts,
    copy_targets,
    has_fp32_first_operand,
    peer_slot_offsets,
    reduction_operands,
    reduction_widths,
)
from overweave.runtime.kernel_calls.call import (
    KernelCall,
    MatrixInput,
    Moving,
    Peers,
    ProtocolWords,
    TileKernelArgs,
    addresses_tensor,
    as_words,
    signal_words,
    stand_in_for,
    table_tensor,
)
from overweave.runtime.kernel_calls.matmul import Operands, hopper_strip, portable_call
from overweave.runtime.kernel_calls.sums_and_copies import (
    Pushes,
    ReductionCall,
    copy_call,
    reduction_call,
    sum_epilogue_args,
)

TensorsByName = Mapping[str, torch.Tensor]
MatmulCall = Callable[[MatmulConfig, Operands, TileKernelArgs], KernelCall]
Some = TypeVar("Some", bound=Operation)
# Index of an engine's work counter; any other kernel uses the first.
COUNTERS: dict[Engine, int] = {REDUCE_KERNEL: 1, COPY_KERNEL: 2}


class Binding:
    """A plan bound to the memory of a workspace, as its kernels see it.

    example: the caller's tensors of one call; they are not kept alive. stand_ins: (tensor, stand-in), whose addresses
    are set before each call. sms: programs of a tile kernel that run at once. traces: of a traced plan, queue -> int64
    `[tiles, TRACE_COLUMNS]`, filled by each call.
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
        self.addresses = WorkspaceAddresses(plan.schedule, plan.realization.dtype, layout, heap.addresses)
        self.protocol = signal_words(workspace, heap, layout.signals)
        self.stand_ins: list[tuple[str, Moving]] = []
        self.traces: dict[str, torch.Tensor] = {}
        self.sms, self._example, self._is_traced = sms, example, is_traced

    def workspace_buffer(self, name: str) -> torch.Tensor:
        """Return this rank's instance of a workspace buffer, shaped as `stored_shape` says."""
        buffer = self.plan.schedule.buffer(name)
        dtype = getattr(torch, buffer.dtype or self.plan.realization.dtype)
        return self.heap.view(self.addresses.layout.buffers[name], stored_shape(buffer), dtype)

    def caller_tensor(self, name: str) -> Moving:
        """Return a new stand-in for a tensor of the caller's."""
        stand_in = stand_in_for(self._example[name])
        self.stand_ins.append((name, stand_in))
        return stand_in

    def second_factors(self) -> tuple[Moving, Moving] | None:
        """Return stand-ins for the second parts of x and w, which extend k; None if there are none."""
        return (self.caller_tensor(X_REST), self.caller_tensor(W_REST)) if X_REST in self._example else None

    def buffer(self, name: str) -> MatrixInput:
        """Return this rank's instance of a buffer, the caller's or the workspace's."""
        return (
            self.caller_tensor(name)
            if self.plan.schedule.buffer(name).home in (INPUT, OUTPUT)
            else self.workspace_buffer(name)
        )

    def programs(self, tiles: int) -> int:
        """Return the programs of a tile kernel."""
        return max(1, min(self.sms, tiles))

    def table(self, rows: object) -> torch.Tensor:
        """Return a table of addresses, on the device."""
        return addresses_tensor(rows, self.workspace.device)

    def tiles(self, queue: str) -> TileKernelArgs:
        """Return the tile table of a kernel's queue, its work counter and the words of the protocol."""
        rows, device = self.plan.tile_order(self.rank, queue).rows, self.workspace.device
        trace_size = len(rows) if self._is_traced else 1
        trace = self.traces[queue] = torch.zeros((trace_size, TRACE_COLUMNS.value), dtype=torch.int64, device=device)
        claims = self.claims(self.plan.realization.engine_of(queue))
        return TileKernelArgs(
            LaunchTiles(table_tensor(rows, device), claims, trace, len(rows)), self.protocol, self._is_traced
        )

    def claims(self, engine: Engine) -> torch.Tensor:
        """Return the work counter by which a kernel's programs claim tiles."""
        return self.workspace.claims[COUNTERS.get(engine, 0) :]

    def operations(self, queue: str, kind: type[Some]) -> list[Some]:
        """Return the operations of a kind on a queue of this rank."""
        return [one for one in self.plan.schedule.of_rank(self.rank) if one.queue == queue and isinstance(one, kind)]


def kernel_call(binding: Binding, queue: str, matmul_call: MatmulCall = portable_call) -> KernelCall | None:
    """Return the call of a queue's kernel; None if it has no tiles on this rank. matmul_call: for a tile kernel."""
    if not binding.plan.tile_order(binding.rank, queue).rows:
        return None
    engine = binding.plan.realization.engine_of(queue)
    if engine == TILE_KERNEL:
        return _multiply(binding, queue, matmul_call)
    return _reduce(binding, queue) if engine == REDUCE_KERNEL else _copy(binding, queue)


def _multiply(binding: Binding, queue: str, matmul_call: MatmulCall) -> KernelCall:
    """Return the call of a matmul kernel: operands, epilogue inputs, addends and peers of the queue's Computes."""
    plan, schedule, config = binding.plan, binding.plan.schedule, binding.plan.realization.matmul
    assert config is not None
    computes, tiles = binding.operations(queue, Compute), binding.tiles(queue)
    epilogue = plan.problem.tile_epilogue(any(compute.finishes for compute in computes))
    shard, gathered = _caller_and_workspace(binding, [compute.a[0] for compute in computes])
    own_scales, gathered_scales = _caller_and_workspace(
        binding, [part for compute in computes for part in compute.scales]
    )
    output_names = {name: outputs(schedule, binding.rank, name) for name in schedule.weights}
    total = next(iter(output_names[schedule.weights[0]][1:]), None)
    epilogue_inputs = {name: binding.caller_tensor(name) for name in epilogue.inputs}
    addends = addend_addresses(binding.addresses, binding.rank, queue)
    addend_shifts = addend_row_shifts(schedule, binding.rank, queue)
    operands = Operands(
        a_shard=binding.caller_tensor(shard) if shard else None,
        a_workspace=binding.workspace_buffer(gathered) if gathered else None,
        weights=tuple((binding.buffer(name), binding.buffer(output_names[name][0])) for name in schedule.weights),
        b_is_transposed=plan.problem.b_is_transposed,
        epilogue_inputs=epilogue_inputs,
        scale_x=binding.caller_tensor(own_scales) if own_scales else None,
        scale_gathered=binding.workspace_buffer(gathered_scales) if gathered_scales else None,
        second_k_part=binding.second_factors(),
        epilogue=epilogue,
        total=binding.buffer(total) if total else None,
        addends=binding.table(addends) if any(addends) else None,
        addend_rows=(binding.workspace_buffer(addend_shifts[0]), binding.table(addend_shifts[1]))
        if addend_shifts
        else None,
        peers=_peers(binding, queue, computes, tiles.queue.tiles / binding.programs(tiles.queue.tiles)),
    )
    return matmul_call(config, operands, tiles)


def _caller_and_workspace(binding: Binding, regions: list[Region]) -> tuple[str | None, str | None]:
    """Return the names of the caller's buffer and of the workspace's among regions; None where there is none."""
    names = dict.fromkeys(region.buffer for region in regions)
    of_caller = {name: binding.plan.schedule.buffer(name).home == INPUT for name in names}
    first = [next((name for name in names if of_caller[name] == is_callers), None) for is_callers in (True, False)]
    return first[0], first[1]


def _peers(binding: Binding, queue: str, computes: list[Compute], waves: float) -> Peers | None:
    """Return where tiles store at other ranks; None if they do not. waves: of tiles."""
    rows = peer_slot_offsets(binding.addresses, binding.rank, queue)
    if not rows:
        return None
    problem, config = binding.plan.problem, binding.plan.realization.matmul
    assert config is not None
    spread_buffer = next(
        (binding.workspace_buffer(copy.buffer) for compute in computes for copy in compute.copies), None
    )
    strip_bytes = prod(hopper_strip(config)) * ITEMSIZE_BYTES[problem.moved_dtype]
    interval_ns = peer_store_interval_ns(problem, computes, waves / len(rows), strip_bytes)
    table = binding.table([*rows, [0 if spread_buffer is None else spread_buffer.data_ptr(), interval_ns]])
    return Peers(table, tuple(distance for _, distance in rows[1:]), spread_buffer)


def _reduce(binding: Binding, queue: str) -> KernelCall:
    """Return the call of the reduction kernel for the queue's Reduces."""
    plan, config = binding.plan, binding.plan.realization.reduction
    assert config is not None
    reduces = binding.operations(queue, Reduce)
    outs = [plan.schedule.buffer(reduce.out.buffer) for reduce in reduces]
    stored = next((out for out in outs if out.home == OUTPUT), outs[0])  # addresses of others are in the table
    problem = plan.problem
    rows, epilogue = problem.of_rows, problem.sum_epilogue
    names = (*rows.inputs, *rows.places) if rows else epilogue.inputs
    tensors = {name: binding.caller_tensor(name) for name in names}
    sums = ReductionCall(
        operands=binding.table(reduction_operands(binding.addresses, binding.rank, queue)),
        widths=reduction_widths(reduces),
        out=tensors[rows.places[0]] if rows else binding.buffer(stored.name),
        cols=stored.cols,
        epilogue_args=sum_epilogue_args(problem, tensors),
        rows=rows_code(rows),
        sum_first=has_fp32_first_operand(plan.schedule, plan.realization.dtype, reduces),
        epilogue=epilogue_code(epilogue),
        **_block_map(binding, reduces),
    )
    return reduction_call(config, binding.tiles(queue), sums)


def _block_map(binding: Binding, reduces: list[Reduce]) -> dict[str, Any]:
    """Return the block map of permuted operands, as fields of ReductionCall; empty if they are not permuted.

    All operands have the same map (verify checks).
    """
    blocks = binding.plan.schedule.buffer(reduces[0].operands[0].buffer).blocks
    if blocks is None:
        return {}
    cells = torch.tensor(blocks.places, dtype=torch.int32, device=binding.workspace.device)
    return {"cells": cells, "cell": (blocks.rows, blocks.cols)}


def _copy(binding: Binding, queue: str) -> KernelCall:
    """Return the call of the copy kernel for the queue's Puts."""
    config = binding.plan.realization.copy
    moves = [one for one in binding.plan.schedule.of_rank(binding.rank) if one.queue == queue]
    assert config is not None
    targets = binding.table(copy_targets(binding.addresses, binding.rank, queue))
    adds = any(isinstance(move, ReducePut) for move in moves)
    name = next((part.buffer for move in moves for part in move.reads), None)  # the one buffer that they read
    if name is None:  # all operations only wait
        return copy_call(config, binding.tiles(queue), Pushes(targets, binding.workspace.state, 1))
    buffer, source = binding.plan.schedule.buffer(name), binding.buffer(name)
    row_words = buffer.cols * source.dtype.itemsize // COPY_WORD_BYTES
    pushes = Pushes(targets, source if adds else as_words(source), row_words, adds)
    return copy_call(config, binding.tiles(queue), pushes)


# The interval at which a tile of the Hopper kernel stores its strips at peers (kernels/hopper/storer.py).

# Strips of so many bytes from each SM at this interval saturate the link.
# MEASURED: on two H200s, 16 rings (benchmarks/results/paces.h200x2.2026-11-22.txt): the quickest, or 1 % behind it
# where tiles are long; 75 ns less take up to 3 % more, 100 ns more up to 6 %.
STRIP_BYTES, LINK_INTERVAL_NS = 2048, 700
# Per so many bytes of k: half of a tile's time for them, divided by its strips (a tile of 128 x 256 has 32).
# MEASURED: 0.69 us (STEP_US in schedules/tiles/shape.py).
STEP_BYTES, STEP_NS = 128, 10


def peer_store_interval_ns(problem: Problem, computes: Iterable[Compute], waves: float, strip_bytes: int) -> int:
    """Return the interval in ns at which a tile stores its strips at peers; 0: without a pause.

    All SMs end their first tiles together, and their next loads queue behind these stores. So strips are stored no
    faster than the link takes them; those of a long tile over half of the time of the next tile. waves: of tiles in
    each shard. The interval follows from k, not from a clock: a tile that waits for a peer would measure a longer time,
    and delay the next rank. Without a pause where that is faster. MEASURED: interleaved, by an earlier rule
    (benchmarks/results/rests.h200x4.2026-11-22.txt):

    - a shard has no second wave: the next rank of a ring waits for each tile. 286 us, and 219 without; on two, by this
      rule, 117 us and 107.
    - a sum goes to several peers: the link is the bound by then. 1,503 us, and 1,427 without; 788 and 717.
    """
    stores_at_all_peers = any(len(compute.copies) > 1 for compute in computes)
    if stores_at_all_peers or waves < LEAST_WAVES:
        return 0
    steps = problem.k * ITEMSIZE_BYTES[problem.dtype] // STEP_BYTES
    return max(LINK_INTERVAL_NS, steps * STEP_NS) * strip_bytes // STRIP_BYTES
