"""Runs a Plan on CPU tensors, one process per rank: checks, agreement among ranks, then the emulation."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from typing import Literal, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from overweave.errors import InputError, MachineError, OverweaveError, PeerError
from overweave.ir.counts import rows_of_counted
from overweave.ir.exchange import addresses_peers
from overweave.ir.operators.forms import input_of
from overweave.ir.plan import Plan
from overweave.ir.schedule import INPUT, OUTPUT, Region
from overweave.ir.timeline.operations import notifiers
from overweave.ir.timeline.timeline import KINDS, WAIT, Timeline
from overweave.memory.board.board import REFUSED
from overweave.memory.group import Group, create_subgroups
from overweave.memory.host.workspace import HostWorkspace
from overweave.runtime.backends import load
from overweave.runtime.host.emulate import HostCall, HostProgram, TensorsByName
from overweave.runtime.trace import HEAD, NOT_A_TILE, Record, Stopwatch, gather_records, make_measured_timeline

Depth = Literal["library", "interpreter"]


def run_on_host(
    plan: Plan,
    group: Group,
    inputs: TensorsByName,
    outputs: TensorsByName,
    depth: Depth = "library",
    timeout_s: float | None = None,
    stopwatch: Stopwatch | None = None,
) -> None:
    """Run this rank's part of `plan` once, as `HostRun.run`."""
    HostRun(plan, group, depth).run(inputs, outputs, timeout_s, stopwatch)


def as_matrices(tensors: TensorsByName) -> dict[str, Tensor]:
    """Return the tensors of a call as plans describe them: vectors as one row, a number as `[1, 1]`.

    A call takes them as they were passed: kernels ask where they lie, and torch's operations broadcast.
    """
    return {name: tensor if tensor.dim() == 2 else tensor.reshape(1, -1) for name, tensor in tensors.items()}


class HostRun:
    """A plan bound to this rank's group. Every rank binds it, and calls follow in the same sequence of plans."""

    def __init__(self, plan: Plan, group: Group, depth: Depth = "library") -> None:
        self._plan, self._group, self._depth = plan, group, depth
        outputs = {buffer.name for buffer in plan.schedule.buffers if buffer.home == OUTPUT}
        self._outputs = outputs | set(plan.problem.also_made)

    def __call__(self, tensors: dict[str, Tensor]) -> None:
        """Run one call. tensors: inputs and outputs by buffer name; vectors may be `[n]`."""
        outputs = {name: tensors[name] for name in self._outputs}
        inputs = {name: tensor for name, tensor in tensors.items() if name not in outputs}
        self.run(as_matrices(inputs), outputs)

    def run(
        self,
        inputs: TensorsByName,
        outputs: TensorsByName,
        timeout_s: float | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """Run this rank's part of the plan.

        inputs, outputs: CPU tensors `[rows, cols]` by buffer name, of the plan's dtype. Outputs are written.
        timeout_s: how long a rank may make no progress before the call fails; the group's timeout by default.
        stopwatch: times every step of this call.

        Raises InputError on a rank whose tensors do not fit and RankMismatch on its peers; RankMismatch if plans
        differ; PeerDied or PeerTimeout, with outputs NaN, if a peer does not do its part; WorkspaceBroken from then on,
        until the workspace is reset.
        """
        plan, group = self._plan, self._group
        timeout_s = group.timeout_s if timeout_s is None else timeout_s
        workspace = HostWorkspace.of(group)
        workspace.check_usable()
        try:
            bound = self._bound
            if bound.addresses_peers and plan.problem.islands != workspace.board.islands.members:
                workspace.board.islands.require_one(f"run {plan.name} on {group.world_size} ranks")
            _check_tensors(plan, group, bound.operands, {**inputs, **outputs})
        except (InputError, MachineError) as error:
            _notify_refusal(workspace, error)
            raise
        is_first = bound.signature not in workspace.agreed
        try:
            _agree(workspace, bound.signature, timeout_s)
        except PeerError:
            workspace.is_broken = True
            for output in outputs.values():
                output.fill_(torch.nan)
            raise
        if is_first:
            create_subgroups(group, plan.schedule.of_rank(group.rank))
        call = bound.make_call(bound.program, group, workspace, timeout_s)
        call.stopwatch = stopwatch
        call.run(inputs, outputs)

    @cached_property
    def _bound(self) -> _Bound:
        """What a rank derives from its plan. Raises InputError."""
        plan, rank, depth = self._plan, self._group.rank, self._depth
        if depth not in _DEPTHS:
            raise InputError(f"depth {depth!r}", "unknown", f"Use one of {', '.join(_DEPTHS)}")
        make_call: type[HostCall] = load(f"host {depth}")
        make_call.check(plan)
        program = HostProgram.of(plan, rank, make_call.kernel_queues(plan))
        reaches = addresses_peers(plan.schedule)
        return _Bound(program, make_call, _signature(plan, depth), _operands(plan, rank), reaches)


_DEPTHS = ("library", "interpreter")


class _Bound(NamedTuple):
    """What a rank derives from a plan once. operands: tensor -> shape, dtype and strides that it must have."""

    program: HostProgram
    make_call: type[HostCall]
    signature: bytes
    operands: dict[str, _Operand]
    addresses_peers: bool


class _Operand(NamedTuple):
    """At least so many rows and columns, of a dtype."""

    rows: int
    cols: int
    dtype: torch.dtype
    is_contiguous: bool


def _signature(plan: Plan, depth: Depth) -> bytes:
    """Return a readable signature that differs for plans that differ."""
    problem = plan.problem
    shape = f"{problem.extents} {problem.dtype}"
    shared = msgspec.json.encode((plan.schedule, plan.realization, problem))
    return f"{plan.name} {shape} {depth} #{blake2b(shared, digest_size=6).hexdigest()}".encode()


def _operands(plan: Plan, rank: int) -> dict[str, _Operand]:
    """Return tensor -> what a rank's operations need it to be."""
    extents = {buffer.name: (0, 0) for buffer in plan.schedule.buffers if buffer.home in (INPUT, OUTPUT)}
    for operation in plan.schedule.operations:
        for region in (*operation.reads, *operation.writes):
            if region.buffer in extents and not region.is_empty:
                _extend_extents(extents, region, operation.rank, rank)
    for name in rows_of_counted(plan.schedule):
        buffer = plan.schedule.buffer(name)
        if buffer.home == INPUT:
            extents[name] = 0, buffer.cols  # of as many rows as a call's counts say
    dtypes: dict[str, str] = {buffer.name: buffer.dtype or plan.realization.dtype for buffer in plan.schedule.buffers}
    contiguous = {buffer.name for buffer in plan.schedule.buffers if buffer.home == OUTPUT}
    for name in (*plan.problem.beside, *plan.problem.also_made):  # of which no schedule knows
        rows, cols, dtypes[name] = plan.problem.operand(name, rank)
        extents[name] = rows, cols
        read = input_of(name)  # a factor is laid out as the weight
        contiguous |= {name} if read is None or read.dtype != "factor" else set()
    return {
        name: _Operand(rows, cols, getattr(torch, dtypes[name]), name in contiguous)
        for name, (rows, cols) in extents.items()
    }


def _extend_extents(extents: dict[str, tuple[int, int]], region: Region, actor: int, rank: int) -> None:
    """Extend the extents by a region of this rank. Raises InputError for a region of a peer's caller."""
    if region.rank != actor:
        cure = "Stage it in a symmetric buffer"
        raise InputError("emulate the plan", f"rank {actor} reaches for {region}, a tensor of a peer's caller", cure)
    if region.rank == rank:
        rows, cols = extents[region.buffer]
        extents[region.buffer] = max(rows, region.rows[1]), max(cols, region.cols[1])


def _check_tensors(plan: Plan, group: Group, operands: dict[str, _Operand], tensors: dict[str, Tensor]) -> None:
    """Raise InputError unless the tensors fit the plan on this rank."""
    asked = f"run {plan.name} on rank {group.rank}"
    if plan.schedule.world_size != group.world_size:
        found = f"the plan is for {plan.schedule.world_size} ranks, the group has {group.world_size}"
        raise InputError(asked, found, "Build the plan for this group")
    if tensors.keys() != operands.keys():
        found = f"got tensors {sorted(tensors)}"
        raise InputError(asked, found, f"Pass {sorted(operands)}")
    for name, (rows, cols, dtype, is_contiguous) in operands.items():
        tensor = tensors[name]
        found = f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        cure = f"Pass a CPU tensor of {dtype}, at least [{rows}, {cols}]"
        if tensor.device.type != "cpu" or tensor.dtype != dtype or tensor.dim() != 2:
            raise InputError(asked, found, cure)
        if tensor.shape[0] < rows or tensor.shape[1] < cols:
            raise InputError(asked, found, cure)
        if is_contiguous and not tensor.is_contiguous():
            raise InputError(asked, f"{found}, strides {tensor.stride()}", f"Pass {name}.contiguous()")


def _notify_refusal(workspace: HostWorkspace, error: OverweaveError) -> None:
    """Publish to the peers, which are about to agree on this call, that this rank refuses it."""
    with suppress(OverweaveError):  # the caller raises this rank's own reason
        workspace.board.agree(f"{REFUSED}{error.found}".encode(), workspace.board.timeout_s)


def _agree(workspace: HostWorkspace, signature: bytes, timeout_s: float) -> None:
    """Compare the call with the peers': the first call of a plan waits for all ranks, later ones do not."""
    if signature in workspace.agreed:
        workspace.board.post(signature)
    else:
        workspace.board.agree(signature, timeout_s)
        workspace.agreed.add(signature)


def trace_on_host(
    plan: Plan, group: Group, inputs: TensorsByName, outputs: TensorsByName, depth: Depth = "library"
) -> Timeline | None:
    """Run the plan once; return on rank 0 when each tile (interpreter depth) or operation ran, None elsewhere.

    Collective. Raises what `run_on_host` does.
    """
    dist.barrier(group.process_group)
    watch = Stopwatch()
    run_on_host(plan, group, inputs, outputs, depth=depth, stopwatch=watch)
    by_rank = gather_records(group, watch.records(plan, group.rank))
    return None if by_rank is None else make_measured_timeline(plan, subtract_poll_time(plan, by_rank))


def subtract_poll_time(plan: Plan, by_rank: list[list[Record]]) -> list[list[Record]]:
    """Return the records with each tile's wait ended when its last signal was set, and its run begun then.

    A GPU polls in a microsecond. An interpreted poll takes as long as a tile: it counts as work, not as a wait.
    """
    ends: dict[str, int] = {}
    for rank, records in enumerate(by_rank):
        operations = tuple(plan.schedule.of_rank(rank))
        for record in records:
            if record.operation != HEAD:
                name = operations[record.operation].name
                ends[name] = max(ends.get(name, 0), record.end_ns)
    sources = notifiers(plan.schedule)
    arrivals = {
        (operation.rank, operation.name): max(
            (
                ends.get(name, 0)
                for wait in operation.all_waits
                for signal in range(*wait.signals)
                for name in sources.get((operation.rank, wait.pad, signal), ())
            ),
            default=0,
        )
        for operation in plan.schedule.operations
    }
    return [
        list(chain.from_iterable(_subtract_poll_time(records, [arrivals[rank, part.name] for part in operations])))
        for rank, records in enumerate(by_rank)
        for operations in [tuple(plan.schedule.of_rank(rank))]
    ]


def _subtract_poll_time(records: list[Record], arrivals: list[int]) -> list[tuple[Record, ...]]:
    """Return one rank's records. arrivals: of each operation, when its last signal was set."""
    waits = {
        (record.operation, record.tile): record
        for record in records
        if record.tile != NOT_A_TILE and KINDS[record.kind] == WAIT
    }
    shortened: list[tuple[Record, ...]] = []
    for record in records:
        wait = waits.get((record.operation, record.tile))
        if wait is None:
            shortened.append((record,))
        elif record is not wait:
            over_ns = min(max(arrivals[record.operation], wait.begin_ns), record.begin_ns)
            shorter = (wait._replace(end_ns=over_ns),) if over_ns > wait.begin_ns else ()
            shortened.append((*shorter, record._replace(begin_ns=over_ns)))
    return shortened
