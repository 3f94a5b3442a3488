"""All-reduce of partials: a partial `[m, n]` on every rank -> their sum `y [m, n]` on every rank, the same bits on all.

One-shot moves every partial to every rank, which adds them all: few messages, for small outputs. Two-shot
(schedules/families/two_shot.py) is a reduce-scatter and an all-gather, piece by piece.
SOURCE: the one- and two-shot all-reduce of TensorRT-LLM and of torch's symmetric memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from overweave.ir.schedule import (
    CREDITS,
    ECHOES,
    Buffer,
    Collective,
    Goal,
    Notify,
    Operation,
    Put,
    Queue,
    Range,
    Reduce,
    SignalPad,
    Wait,
)
from overweave.ir.tensors import product
from overweave.schedules.communication import (
    ARRIVED,
    COMPLETE,
    COPIES,
    ISSUE,
    MAIN,
    PACKED,
    PARTIAL,
    SLOTS,
    SUMS,
    TILES,
    TOTAL,
    A,
    B,
    Chunk,
    Communication,
    Split,
    Y,
    is_empty,
    region,
    used,
)
from overweave.schedules.families.packed.two_shot import two_shot_packed, two_shot_packed_pads
from overweave.schedules.families.reduced import Reduced, Summing
from overweave.schedules.families.ring_stored import ring_stored
from overweave.schedules.families.two_shot import two_shot, two_shot_queues

Steps = Iterator[Operation | Chunk]


def all_reduce(split: Split, cols: int, how: ReduceWay, held: tuple[Range, ...], summing: Summing) -> Communication:
    """The moves of an all-reduce of `[split.rows, cols]`, with a `Chunk` where each part of a partial is written.

    COLLECTIVE: the library's, in place. ONE_SHOT: partials are put to every peer. ONE_SHOT_PACKED: as ONE_SHOT, in
    messages that carry their flag. Either way every rank adds the same numbers in rank order. TWO_SHOT, RING_STORED,
    TWO_SHOT_PACKED: in files of these names.
    held: the range of the reduced axis that each rank's partial holds.
    """
    ranks, rows = range(split.world_size), split.rows
    slots = rows if how.sends == "everything" else split.shard_size
    reduced = Reduced(
        split,
        Buffer(PARTIAL, rows, cols, "local"),
        Buffer(SLOTS, split.world_size * slots, cols, "symmetric"),
        Buffer(TOTAL, rows, cols, "symmetric"),
        Buffer(Y, rows, cols, "output"),
        summing,
    )
    is_alone = split.world_size == 1
    listed = [step for rank in ranks for step in (_alone if is_alone else how.steps)(reduced, rank)] if rows else []
    queues = () if is_alone else how.queues(reduced)
    steps, pads = tuple(listed), how.pads(split) if how.pads else ()
    return Communication(
        world_size=split.world_size,
        buffers=used((reduced.partial, reduced.slots, reduced.total, reduced.y), steps),
        pads=() if is_alone else pads,
        queues=queues,
        given=(),
        goal=tuple(goal for rank in ranks if rows for goal in _goals(reduced, rank, held, how)),
        steps=steps,
        behind=reduced.behind,
        reuse=CREDITS if how.pads is None or is_alone else ECHOES,
    )


def _goals(reduced: Reduced, rank: int, held: tuple[Range, ...], how: ReduceWay) -> Iterator[Goal]:
    """The sum in rank order; of a ring, each shard's round from its owner's successor."""
    if how.adds == "by_rank":
        yield Goal(region(reduced.y, rank, reduced.rows), product(A, B), 0, 0, held)
        return
    for owner in range(reduced.size):
        rows = reduced.split.shard(owner)
        if not is_empty(rows):
            terms = tuple(held[(owner + hop) % reduced.size] for hop in range(1, reduced.size + 1))
            yield Goal(region(reduced.y, rank, rows), product(A, B), rows[0], 0, terms)


def _alone(reduced: Reduced, rank: int) -> Steps:
    """A group of one: the product is the result."""
    yield reduced.multiplied(rank, reduced.y)


def _collective(reduced: Reduced, rank: int) -> Steps:
    yield from _alone(reduced, rank)
    whole = (region(reduced.y, rank, reduced.rows),)
    yield Collective(
        name=f"all_reduce.{rank}",
        rank=rank,
        queue=MAIN,
        function="all_reduce",
        label="all_reduce",
        ranks=tuple(range(reduced.size)),
        sources=whole,
        destinations=whole,
    )


def _one_shot(reduced: Reduced, rank: int) -> Steps:
    own = reduced.multiplied(rank, reduced.partial)
    yield own
    for step, peer in enumerate(reduced.split.peers(rank), 1):
        yield Put(
            name=f"push.{rank}-{peer}",
            rank=rank,
            queue=reduced.split.copy_queue(step),
            sources=(own.region,),
            destinations=(reduced.slot(peer, rank, reduced.rows),),
            tiles=reduced.split.put_tiles(reduced.split.rows),
        )
    slots = [reduced.slot(rank, source, reduced.rows) for source in range(reduced.size)]
    yield Reduce(
        name=f"sum.{rank}",
        rank=rank,
        queue=SUMS,
        operands=tuple(own.region if source == rank else slot for source, slot in enumerate(slots)),
        out=region(reduced.y, rank, reduced.rows),
    )


def _one_shot_packed(reduced: Reduced, rank: int) -> Steps:
    """As one_shot, but what arrives says so itself: no signals of the slot, no head of the call."""
    own = reduced.multiplied(rank, reduced.partial)
    yield own
    for peer in reduced.split.peers(rank):
        yield Put(
            name=f"push.{rank}-{peer}",
            rank=rank,
            queue=PACKED,
            notifies=(Notify(ARRIVED, peer, reduced.split.place(rank, peer)),),
            sources=(own.region,),
            destinations=(reduced.slot(peer, rank, reduced.rows),),
        )
    slots = [reduced.slot(rank, source, reduced.rows) for source in range(reduced.size)]
    yield Reduce(
        name=f"sum.{rank}",
        rank=rank,
        queue=PACKED,
        waits=(Wait(ARRIVED, (0, reduced.size - 1), 1),),
        operands=tuple(own.region if source == rank else slot for source, slot in enumerate(slots)),
        out=region(reduced.y, rank, reduced.rows),
    )


def _one_shot_queues(reduced: Reduced) -> tuple[Queue, ...]:
    # Sums that wait for peers must not hold the SMs that a kernel's own pushes need.
    after = (MAIN, TILES, COPIES) if reduced.split.is_by_kernel else (MAIN, TILES)
    return (*reduced.split.copy_queues((MAIN,)), Queue(SUMS, ISSUE, after=after))


def _behind_matmul(queue: str) -> Callable[[Reduced], tuple[Queue, ...]]:
    return lambda reduced: (Queue(queue, ISSUE, after=(MAIN,)),)


class ReduceWay(NamedTuple):
    """What a rank does, in launch order, and in which queues. pads: of packed messages, which number their signals as
    the kernel does; None: signals are derived. sends: a rank to each peer, the peer's shard or all that it has. adds:
    as of a reduce-scatter.
    """

    steps: Callable[[Reduced, int], Steps]
    queues: Callable[[Reduced], tuple[Queue, ...]]
    pads: Callable[[Split], tuple[SignalPad, ...]] | None = None
    sends: Literal["shard", "everything"] = "shard"
    adds: Literal["by_rank", "round"] = "by_rank"


COLLECTIVE = ReduceWay(_collective, lambda reduced: (Queue(MAIN, COMPLETE, after=(TILES,)),))
ONE_SHOT = ReduceWay(_one_shot, _one_shot_queues, sends="everything")
ONE_SHOT_PACKED = ReduceWay(
    _one_shot_packed, _behind_matmul(PACKED), lambda split: (SignalPad(ARRIVED, split.world_size - 1),), "everything"
)
TWO_SHOT = ReduceWay(two_shot, two_shot_queues)
TWO_SHOT_PACKED = ReduceWay(two_shot_packed, _behind_matmul(PACKED), two_shot_packed_pads)
RING_STORED = ReduceWay(ring_stored, lambda reduced: (Queue(SUMS, ISSUE, after=(TILES,)),), adds="round")
