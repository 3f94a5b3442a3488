"""Lowers a Schedule's regions and signals to addresses, for one rank and the workspace memory of a call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from overweave.errors import ScheduleError
from overweave.ir.dtype import SUM_DTYPE, Dtype, MovedDtype
from overweave.ir.plan import INT32_BYTES
from overweave.ir.schedule import (
    INPUT,
    OUTPUT,
    SYMMETRIC,
    Compute,
    Operation,
    Put,
    Reduce,
    Region,
    Schedule,
    Wait,
)
from overweave.memory.layout import SlotLayout


class MemoryRef(Struct, frozen=True):
    """Where a copy reads or writes: an absolute address; or a byte offset into the caller's tensor named `tensor`."""

    tensor: str | None
    address: int
    pitch_bytes: int


class CopyStep(Struct, frozen=True):
    """Copy `rows` rows of `row_bytes` bytes; rows are `pitch_bytes` apart on either side."""

    source: MemoryRef
    target: MemoryRef
    row_bytes: int
    rows: int


class WaitStep(Struct, frozen=True):
    """Make the stream wait until this rank's int32 word at `address` is at least `value`."""

    address: int
    value: int


class WriteStep(Struct, frozen=True):
    """Set an int32 word of any rank, in stream order."""

    address: int
    value: int


StreamStep = CopyStep | WaitStep | WriteStep


class WorkspaceAddresses(Struct, frozen=True):
    """The workspace memory of a call (a slot) as one rank addresses it.

    bases: address of each rank's slot, in this rank's address space: peers' are mapped.
    """

    schedule: Schedule
    dtype: Dtype
    layout: SlotLayout
    bases: tuple[int, ...]

    def signal(self, rank: int, pad: str, index: int) -> int:
        """Return the address of the signal's word on a rank, in this rank's address space."""
        return self.bases[rank] + self.layout.signal_offset(pad, index)

    def memory_ref(self, region: Region) -> MemoryRef:
        """Return where a region starts: an address in the workspace, or an offset into the caller's tensor."""
        buffer = self.schedule.buffer(region.buffer)
        itemsize = buffer.itemsize_bytes(self.dtype)
        pitch = buffer.cols * itemsize
        offset = region.rows[0] * pitch + region.cols[0] * itemsize
        if buffer.home in (INPUT, OUTPUT):
            return MemoryRef(buffer.name, offset, pitch)
        return MemoryRef(None, self.bases[region.rank] + self.layout.buffers[buffer.name] + offset, pitch)


def copy_steps(addresses: WorkspaceAddresses, operations: Iterable[Operation]) -> tuple[StreamStep, ...]:
    """Lower the operations of one copy-engine queue to stream operations: waits, copies, signal writes, in order.

    An empty chunk, or a Copy without sources (it relays notifies), still waits and signals.
    """
    steps: list[StreamStep] = []
    for operation in operations:
        steps += wait_steps(addresses, operation)
        steps += _chunk_copies(addresses, operation)
        steps += write_steps(addresses, operation)
    return tuple(steps)


def wait_steps(addresses: WorkspaceAddresses, operation: Operation, only: Wait | None = None) -> Iterator[WaitStep]:
    """Yield stream waits for the signals of an operation's waits. only: for those of this wait alone."""
    for wait in operation.all_waits if only is None else (only,):
        for index in range(*wait.signals):
            yield WaitStep(addresses.signal(operation.rank, wait.pad, index), wait.count)


def write_steps(addresses: WorkspaceAddresses, operation: Operation) -> Iterator[WriteStep]:
    """Yield stream writes for an operation's notifies.

    A write sets the word to 1: it is the signal's only contributor, which verify checks (ir/verify/engines/replays.py).
    """
    for notify in operation.notifies:
        yield WriteStep(addresses.signal(notify.rank, notify.pad, notify.signal), 1)


def reduction_operands(addresses: WorkspaceAddresses, rank: int, queue: str) -> list[list[int]]:
    """Return one row of addresses per Reduce of the queue: operands in order, output, signals of each notified rank.

    Output 0 is the caller's tensor. Rows are padded by 0 to the widths of `reduction_widths`. Raises ScheduleError for
    a Reduce that reads the caller's tensors.
    """
    reduces = [op for op in addresses.schedule.of_rank(rank) if op.queue == queue and isinstance(op, Reduce)]
    operands, _, notified_ranks = reduction_widths(reduces)
    return [_reduction_row(addresses, reduce, operands, notified_ranks) for reduce in reduces]


def reduction_widths(reduces: Sequence[Reduce]) -> tuple[int, int, int]:
    """Return three constants of a reduction kernel: (operands, first, notified ranks).

    operands: of a sum, at most. first: index of the operand read first: 0, or the one after this rank's own if others
    lie on peers, so that ranks do not all read from one. notified ranks: of a tile, at most, as a power of two.
    """
    widest = max(reduces, key=lambda reduce: len(reduce.operands), default=None)
    operands = [operand.rank for operand in widest.operands] if widest else []
    own = operands.index(widest.rank) if widest and widest.rank in operands and len(set(operands)) > 1 else -1
    notified_ranks = max((len(reduce.notifies) for reduce in reduces), default=0)
    return len(operands), (own + 1) % max(1, len(operands)), 1 << max(0, notified_ranks - 1).bit_length()


def has_fp32_first_operand(schedule: Schedule, dtype: Dtype, reduces: Iterable[Reduce]) -> bool:
    """Return whether the first operand of each sum is fp32 and its result is of a narrower dtype."""

    def dtype_of(region: Region) -> MovedDtype:
        return schedule.buffer(region.buffer).dtype or dtype

    return all(dtype_of(reduce.operands[0]) == SUM_DTYPE != dtype_of(reduce.out) for reduce in reduces)


def addend_addresses(addresses: WorkspaceAddresses, rank: int, queue: str) -> list[list[int]]:
    """Return one row per Compute of the queue: absolute addresses of its addends, biased by the output's rows.

    Each is the address of the addend's first row minus `out_row * pitch_bytes`, so that a tile adds its own output row
    times the pitch. Addends (partial products that the tile adds) lie in symmetric memory, this rank's or a peer's
    (verify checks). Rows are padded with 0.
    """
    computes = [op for op in addresses.schedule.of_rank(rank) if op.queue == queue and isinstance(op, Compute)]
    width = max((len(compute.addends) for compute in computes), default=0)
    return [_addend_row(addresses, compute, width) for compute in computes]


def addend_row_shifts(schedule: Schedule, rank: int, queue: str) -> tuple[str, list[int]] | None:
    """Return (buffer, row shifts) if each Compute of the queue has one addend and all lie in one own buffer; else None.

    The shift of a Compute: row of its addend in that buffer, minus row of its result in the output.
    """
    computes = [op for op in schedule.of_rank(rank) if op.queue == queue and isinstance(op, Compute)]
    locations = {(addend.buffer, addend.rank) for compute in computes for addend in compute.addends}
    if len(locations) != 1 or any(len(compute.addends) > 1 or len(compute.out) != 1 for compute in computes):
        return None
    ((buffer, owner),) = locations
    if owner != rank:
        return None
    return buffer, [sum(part.rows[0] - op.out[0].rows[0] for part in op.addends) for op in computes]


def peer_slot_offsets(addresses: WorkspaceAddresses, rank: int, queue: str) -> list[list[int]]:
    """Return, for this rank and then each following one: address of its signals, offset of its slot from the own slot.

    Empty if no Compute of the queue stores to a peer.
    """
    computes = (op for op in addresses.schedule.of_rank(rank) if op.queue == queue and isinstance(op, Compute))
    if all(compute.stored_at == {rank} for compute in computes):
        return []
    bases = addresses.bases[rank:] + addresses.bases[:rank]
    return [[base, base - bases[0]] for base in bases]


def _addend_row(addresses: WorkspaceAddresses, compute: Compute, width: int) -> list[int]:
    refs = [addresses.memory_ref(region) for region in compute.addends]
    out_row = compute.out[0].rows[0] if compute.out else 0
    return [ref.address - out_row * ref.pitch_bytes for ref in refs] + [0] * (width - len(refs))


def copy_targets(addresses: WorkspaceAddresses, rank: int, queue: str) -> list[list[int]]:
    """Return one row per operation of a copy kernel's queue: address of the destination's buffer, and of its signals.

    Both are 0 for an operation that only waits. Raises ScheduleError for a destination outside of the workspace.
    """
    rows: list[list[int]] = []
    for move in (op for op in addresses.schedule.of_rank(rank) if op.queue == queue):
        targets = move.writes
        if any(addresses.schedule.buffer(target.buffer).home != SYMMETRIC for target in targets):
            found = "its destination does not lie in the workspace"
            raise ScheduleError(f"{move.name}: push by a kernel", found, "Put into a symmetric buffer")
        bases = [addresses.bases[target.rank] for target in targets] or [0]
        offsets = [addresses.layout.buffers[target.buffer] for target in targets] or [0]
        rows.append([bases[0] + offsets[0], bases[0]])
    return rows


def slice_targets(addresses: WorkspaceAddresses, rank: int, queue: str) -> list[list[int]]:
    """Return one row per operation of a queue whose tiles push slices of Puts; zeros for other operations.

    A row: address of the destination's buffer on the peer, of the peer's signals, of the source's buffer (0: the
    caller's tensor), and int32 words in a row of the matrix.
    """
    rows: list[list[int]] = []
    schedule, layout = addresses.schedule, addresses.layout
    for move in (op for op in schedule.of_rank(rank) if op.queue == queue):
        row = [0, 0, 0, 0]
        for source, target in zip(move.reads, move.writes, strict=True) if isinstance(move, Put) else ():
            source_buffer, target_buffer = schedule.buffer(source.buffer), schedule.buffer(target.buffer)
            base = addresses.bases[target.rank]
            is_callers = source_buffer.home in (INPUT, OUTPUT)
            source_address = 0 if is_callers else addresses.bases[rank] + layout.buffers[source_buffer.name]
            words = target_buffer.cols * target_buffer.itemsize_bytes(addresses.dtype) // INT32_BYTES
            row = [base + layout.buffers[target_buffer.name], base, source_address, words]
        rows.append(row)
    return rows


def _reduction_row(addresses: WorkspaceAddresses, reduce: Reduce, width: int, notified_ranks: int) -> list[int]:
    """Return the row of one Reduce, padded to `width` operands and `notified_ranks` signals."""
    refs = [addresses.memory_ref(region) for region in reduce.operands]
    if any(ref.tensor for ref in refs):
        found, cure = "an operand is the caller's tensor", "Reduce from symmetric or local buffers"
        raise ScheduleError(f"{reduce.name}: reduce", found, cure)
    target = addresses.memory_ref(reduce.out)
    operands = [ref.address for ref in refs] + [0] * (width - len(refs))
    signal_bases = [addresses.bases[notify.rank] for notify in reduce.notifies]
    return [
        *operands,
        0 if target.tensor else target.address,
        *signal_bases,
        *[0] * (notified_ranks - len(signal_bases)),
    ]


def _chunk_copies(addresses: WorkspaceAddresses, operation: Operation) -> Iterator[CopyStep]:
    """Yield the copies of an operation that are not empty. Raises ScheduleError for permuted blocks."""
    if any(addresses.schedule.buffer(part.buffer).blocks for part in (*operation.reads, *operation.writes)):
        found, cure = "its blocks are permuted, and copies address rows and columns", "Run it on CPU tensors"
        raise ScheduleError(f"copy {operation.name}", found, cure)
    for source, target in zip(getattr(operation, "sources", ()), getattr(operation, "destinations", ()), strict=True):
        if not source.is_empty:
            rows, cols = source.shape
            row_bytes = cols * addresses.schedule.buffer(source.buffer).itemsize_bytes(addresses.dtype)
            yield CopyStep(addresses.memory_ref(source), addresses.memory_ref(target), row_bytes, rows)
