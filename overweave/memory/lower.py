"""From a Schedule to addresses: the steps of a copy queue and the operands of a reduction, for one rank and slot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from overweave.errors import ScheduleError
from overweave.ir.dtype import SUM_DTYPE, Dtype, MovedDtype
from overweave.ir.kernel_limits import INT32_BYTES
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
from overweave.memory.steps import CopyStep, MemoryRef, StreamStep, WaitStep, WriteStep


class SlotAddresses(Struct, frozen=True):
    """One slot as one rank sees it. bases: where the slot of each rank lies in this rank's address space."""

    schedule: Schedule
    dtype: Dtype
    layout: SlotLayout
    bases: tuple[int, ...]

    def signal(self, rank: int, pad: str, index: int) -> int:
        """The address of a signal's word on any rank."""
        return self.bases[rank] + self.layout.signal_offset(pad, index)

    def place(self, region: Region) -> MemoryRef:
        """Where a region starts: an address, or an offset into the caller's tensor of that name."""
        buffer = self.schedule.buffer(region.buffer)
        itemsize = buffer.itemsize_bytes(self.dtype)
        pitch = buffer.cols * itemsize
        offset = region.rows[0] * pitch + region.cols[0] * itemsize
        if buffer.home in (INPUT, OUTPUT):
            return MemoryRef(buffer.name, offset, pitch)
        return MemoryRef(None, self.bases[region.rank] + self.layout.buffers[buffer.name] + offset, pitch)


def copy_steps(addresses: SlotAddresses, operations: Iterable[Operation]) -> tuple[StreamStep, ...]:
    """What the copy engine does for Puts and Gets of one queue, in order. Empty chunks still signal."""
    steps: list[StreamStep] = []
    for operation in operations:
        steps += wait_steps(addresses, operation)
        steps += _moves(addresses, operation)
        steps += write_steps(addresses, operation)
    return tuple(steps)


def wait_steps(addresses: SlotAddresses, operation: Operation, only: Wait | None = None) -> Iterator[WaitStep]:
    """Stream waits for the signals of an operation's waits, or of one of them."""
    for wait in operation.all_waits if only is None else (only,):
        for index in range(*wait.signals):
            yield WaitStep(addresses.signal(operation.rank, wait.pad, index), wait.count)


def write_steps(addresses: SlotAddresses, operation: Operation) -> Iterator[WriteStep]:
    """Stream writes for an operation's notifies. A write sets a word, whose only contributor it is, as verify knows
    (ir/verify/engines/replays.py)."""
    for notify in operation.notifies:
        yield WriteStep(addresses.signal(notify.rank, notify.pad, notify.signal), 1)


def reduction_operands(addresses: SlotAddresses, rank: int, queue: str) -> list[list[int]]:
    """One row per Reduce of the queue: its operands' addresses in order, then the output's (0: the caller's tensor), at
    the end those of the signals of all ranks that its tiles tell.

    Rows are as wide as `widths_of` says: address 0 is none. Raises ScheduleError for a Reduce that reads the caller's
    tensors.
    """
    reduces = [op for op in addresses.schedule.of_rank(rank) if op.queue == queue and isinstance(op, Reduce)]
    operands, _, told = widths_of(reduces)
    return [_reduction_row(addresses, reduce, operands, told) for reduce in reduces]


def widths_of(reduces: Sequence[Reduce]) -> tuple[int, int, int]:
    """Of a kernel's sums: how many operands they have, at most; which of them is read first, that behind the own one if
    others lie at peers; and how many ranks a tile tells at once, rounded up to a power of two.
    """
    longest = max(reduces, key=lambda reduce: len(reduce.operands), default=None)
    operands = [operand.rank for operand in longest.operands] if longest else []
    own = operands.index(longest.rank) if longest and longest.rank in operands and len(set(operands)) > 1 else -1
    told = max((len(reduce.notifies) for reduce in reduces), default=0)
    return len(operands), (own + 1) % max(1, len(operands)), 1 << max(0, told - 1).bit_length()


def sums_first(schedule: Schedule, dtype: Dtype, reduces: Iterable[Reduce]) -> bool:
    """Whether the first operands of a kernel's sums are kept in fp32, where results are of a narrower dtype."""

    def kept(region: Region) -> MovedDtype:
        return schedule.buffer(region.buffer).dtype or dtype

    return all(kept(reduce.operands[0]) == SUM_DTYPE != kept(reduce.out) for reduce in reduces)


def addend_addresses(addresses: SlotAddresses, rank: int, queue: str) -> list[list[int]]:
    """One row per Compute of the queue: for each addend, where row 0 of the output's buffer would lie beside it.

    Rows are as wide as the most addends need: address 0 is none. All lie in the workspace, as verify knows.
    """
    computes = [op for op in addresses.schedule.of_rank(rank) if op.queue == queue and isinstance(op, Compute)]
    width = max((len(compute.addends) for compute in computes), default=0)
    return [_addend_row(addresses, compute, width) for compute in computes]


def addend_shifts(schedule: Schedule, rank: int, queue: str) -> tuple[str, list[int]] | None:
    """The one buffer of the rank's in which the addends of a queue's Computes lie, and for each Compute by how many
    rows its addend lies further there than its result in its own buffer. None without addends, or if a Compute has
    several, or they lie in several places.
    """
    computes = [op for op in schedule.of_rank(rank) if op.queue == queue and isinstance(op, Compute)]
    places = {(addend.buffer, addend.rank) for compute in computes for addend in compute.addends}
    if len(places) != 1 or any(len(compute.addends) > 1 or len(compute.out) != 1 for compute in computes):
        return None
    ((buffer, owner),) = places
    if owner != rank:
        return None
    return buffer, [sum(part.rows[0] - op.out[0].rows[0] for part in op.addends) for op in computes]


def peer_places(addresses: SlotAddresses, rank: int, queue: str) -> list[list[int]]:
    """For each rank, the own one first and the others as they follow it: where its signals lie, and how many bytes
    behind the own slot its slot does. Nothing if no Compute of the queue stores at a peer.
    """
    computes = (op for op in addresses.schedule.of_rank(rank) if op.queue == queue and isinstance(op, Compute))
    if all(compute.stored_at == {rank} for compute in computes):
        return []
    bases = addresses.bases[rank:] + addresses.bases[:rank]
    return [[base, base - bases[0]] for base in bases]


def _addend_row(addresses: SlotAddresses, compute: Compute, width: int) -> list[int]:
    places = [addresses.place(region) for region in compute.addends]
    top = compute.out[0].rows[0] if compute.out else 0
    return [place.address - top * place.pitch_bytes for place in places] + [0] * (width - len(places))


def copy_targets(addresses: SlotAddresses, rank: int, queue: str) -> list[list[int]]:
    """One row per operation of a copy kernel's queue: where its destination's buffer lies, and its peer's signals.

    What only waits goes nowhere. Raises ScheduleError for a destination that is a peer's own tensor.
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


def slice_targets(addresses: SlotAddresses, rank: int, queue: str) -> list[list[int]]:
    """One row per operation of a queue whose tiles carry Puts: where the destination's buffer lies on the peer, where
    the peer's signals do, where the source's buffer does (0: with the caller), and how many int32 are in a row.

    An operation that is no Put has a row of zeros.
    """
    rows: list[list[int]] = []
    schedule, layout = addresses.schedule, addresses.layout
    for move in (op for op in schedule.of_rank(rank) if op.queue == queue):
        row = [0, 0, 0, 0]
        for source, target in zip(move.reads, move.writes, strict=True) if isinstance(move, Put) else ():
            origin, landed = schedule.buffer(source.buffer), schedule.buffer(target.buffer)
            base = addresses.bases[target.rank]
            is_callers = origin.home in (INPUT, OUTPUT)
            origin_address = 0 if is_callers else addresses.bases[rank] + layout.buffers[origin.name]
            words = landed.cols * landed.itemsize_bytes(addresses.dtype) // INT32_BYTES
            row = [base + layout.buffers[landed.name], base, origin_address, words]
        rows.append(row)
    return rows


def _reduction_row(addresses: SlotAddresses, reduce: Reduce, width: int, most: int) -> list[int]:
    places = [addresses.place(region) for region in reduce.operands]
    if any(place.tensor for place in places):
        found, cure = "an operand is the caller's tensor", "Reduce from symmetric or local buffers"
        raise ScheduleError(f"{reduce.name}: reduce", found, cure)
    target = addresses.place(reduce.out)
    operands = [place.address for place in places] + [0] * (width - len(places))
    told = [addresses.bases[notify.rank] for notify in reduce.notifies]
    return [*operands, 0 if target.tensor else target.address, *told, *[0] * (most - len(told))]


def _moves(addresses: SlotAddresses, operation: Operation) -> Iterator[CopyStep]:
    if any(addresses.schedule.buffer(part.buffer).blocks for part in (*operation.reads, *operation.writes)):
        found, cure = "its blocks are permuted, and copies address rows and columns", "Run it on CPU tensors"
        raise ScheduleError(f"copy {operation.name}", found, cure)
    for source, target in zip(getattr(operation, "sources", ()), getattr(operation, "destinations", ()), strict=True):
        if not source.is_empty:
            rows, cols = source.shape
            row_bytes = cols * addresses.schedule.buffer(source.buffer).itemsize_bytes(addresses.dtype)
            yield CopyStep(addresses.place(source), addresses.place(target), row_bytes, rows)
