"""Tokens sent without a look of the host: the programs of `plan="push"`, on any device and on paper.

Each rank tells all peers how many rows it has for whom, and stores each peer's rows on that peer, where `shard` rows of
every source have their place; so it sends before it hears anything, and one proof serves every routing. A receiver
puts together what came, source by source. On the way back parts land at the owner of a token in the same manner, and
it adds those of all ranks. On paper every token goes to every rank, and rows stand in the order in which they are sent:
which tokens these are, and where a source's begin among those received, is a permutation that counts say.
SOURCE: docs/design/0004-house.md for regions as upper bounds; DeepEP for a token that travels once to a rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from overweave.errors import InputError
from overweave.ir.schedule import Schedule
from overweave.lang.mapping import TileChannel, Tiles
from overweave.memory.group import Group
from overweave.moe.programs import RowsPlace
from overweave.ops.author.proven_program import proven_program
from overweave.ops.author.tile_program import TileCall, TileProgram
from overweave.ops.author.tile_schedule import CallersMatrix, tile_schedule
from overweave.runtime.backends import load
from overweave.runtime.handwritten import (
    Access,
    AnyBuffer,
    Declared,
    Part,
    Sent,
    SymmetricBuffer,
    TileLaunch,
    TileRows,
)
from overweave.runtime.library import rows as library
from overweave.runtime.sent_rows import Parts, Placed, Sending, SendSizes

INTERPRET = "TRITON_INTERPRET"  # Triton's: kernels run on CPU ranks, too


class RowsStep(NamedTuple):
    """One step of a program on rows: by a kernel, and in plain torch."""

    launch: Callable[[], TileLaunch]
    run: Callable[[AnyBuffer], object]


def dispatch_buffers(sizes: SendSizes, ranks: int) -> tuple[dict[str, SymmetricBuffer], dict[str, TileChannel]]:
    """Return the symmetric buffers and channels of a dispatch."""
    buffers, channels = combine_buffers(sizes, ranks)
    if sizes.metadata:
        buffers["metadata"] = SymmetricBuffer(ranks * sizes.shard, sizes.metadata, torch.int32)
    buffers["counts"] = SymmetricBuffer(ranks, ranks + 1, torch.int32)
    return buffers, {"counts": TileChannel(Tiles(ranks, 1, 1, 1, ranks)), **channels}


def combine_buffers(sizes: SendSizes, ranks: int) -> tuple[dict[str, SymmetricBuffer], dict[str, TileChannel]]:
    """Return those of a combine. Each Triton program that sends is a tile of its rank's shard."""
    buffers = {"landed": SymmetricBuffer(ranks * sizes.shard, sizes.words, torch.int32)}
    return buffers, {"arrived": TileChannel(Tiles(ranks * sizes.programs, 1, 1, 1, ranks))}


BUFFERS = {"dispatch": dispatch_buffers, "combine": combine_buffers}


def write_dispatch(
    call: TileCall,
    sizes: SendSizes,
    steps: tuple[RowsStep, RowsStep],
    given: dict[str, RowsPlace],
    received: Part | None = None,
) -> None:
    """Write a dispatch: rows are stored on the ranks of their experts. steps: push, and land. given: `counts` of this
    rank, `landed`, the rows that it may send, and `metadata` of these, if there is any. received: what lands of them on
    paper."""
    push, land = steps
    peers, own, each = _peers(call), _block(call.rank, sizes), slice(call.rank, call.rank + 1)
    names = [name for name in ("landed", "metadata") if name in given]
    told = [Sent(((given["counts"], call.part("counts", peer)[each]),), "counts", call.rank) for peer in peers]
    sent = [
        Sent(tuple((given[name], call.part(name, peer)[own]) for name in names), "arrived", call.rank, sizes.programs)
        for peer in peers
    ]
    call.queue("pushes").rank_rows(TileRows("push", *push, sends=(*told, *sent)))
    awaits = tuple((channel, peer) for channel in ("counts", "arrived") for peer in peers)
    reads = [Access(call.part("counts")[peer : peer + 1], "counts", peer) for peer in peers]
    for peer in peers:
        block = _block(peer, sizes)
        reads += [Access(call.part(name)[block], name, block.start) for name in names]
    first = {"counts": call.rank, "landed": own.start, "metadata": own.start}
    reads += [Access(place, name, first[name]) for name, place in given.items() if isinstance(place, Part)]
    makes = () if received is None else (Access(received, "received"),)
    call.rank_rows(TileRows("land", *land, awaits, (), tuple(reads), makes))


def write_combine(
    call: TileCall, sizes: SendSizes, steps: tuple[RowsStep, RowsStep], parts: RowsPlace, y: Part | None = None
) -> None:
    """Write a combine: parts are stored on the owners of tokens. steps: push, and add. parts: of all rows that this
    rank may have received, source by source. y: the sums on paper."""
    push, add = steps
    peers, own = _peers(call), _block(call.rank, sizes)
    sends = []
    for peer in peers:
        mine = parts[_block(peer, sizes)] if isinstance(parts, Part) else parts
        moves = ((mine, call.part("landed", peer)[own]),)
        sends.append(Sent(moves, "arrived", call.rank, sizes.programs))
    call.rank_rows(TileRows("push", *push, sends=tuple(sends)))
    reads = [Access(call.part("landed")[_block(peer, sizes)], f"part.{peer}", own.start) for peer in peers]
    if isinstance(parts, Part):
        reads.append(Access(parts[own], f"part.{call.rank}", own.start))
    makes = () if y is None else (Access(y, "y", own.start),)
    call.rank_rows(TileRows("add", *add, tuple(("arrived", peer) for peer in peers), (), tuple(reads), makes))


def _peers(call: TileCall) -> list[int]:
    return [(call.rank + step) % call.world_size for step in range(1, call.world_size)]


def _block(rank: int, sizes: SendSizes) -> slice:
    """Return the rows of a rank in the staging buffer of any other one."""
    return slice(rank * sizes.shard, (rank + 1) * sizes.shard)


class RowsSender(NamedTuple):
    """How a rank sends rows, and adds what comes back of them: its group, and the sizes of a call."""

    group: Group
    sizes: SendSizes

    def land(self, sending: Sending, placed: Placed) -> None:
        """Send rows to all ranks, and pack those that arrive, source by source."""
        sizes, rank = self.sizes, self.group.rank
        push = RowsStep(lambda: load("rows push")(sizes, sending), partial(library.push, sizes, rank, sending))
        land = RowsStep(
            lambda: load("rows land")(sizes, sending, placed), partial(library.land, sizes, rank, sending, placed)
        )
        assert sending.counts is not None
        given: dict[str, RowsPlace] = {"counts": sending.counts, "landed": sending.source.rows}
        if sending.source.metadata is not None:
            given["metadata"] = sending.source.metadata
        with self._program("dispatch", placed.out.device).call() as call:
            write_dispatch(call, sizes, (push, land), given)

    def add(self, sending: Sending, parts: Parts, y: torch.Tensor) -> None:
        """Send parts to the owners of their tokens, and add those that arrive."""
        sizes, rank = self.sizes, self.group.rank
        push = RowsStep(lambda: load("rows push")(sizes, sending), partial(library.push, sizes, rank, sending))
        add = RowsStep(lambda: load("rows add")(sizes, sending, parts, y), partial(library.add, sizes, rank, parts, y))
        with self._program("combine", y.device).call() as call:
            write_combine(call, sizes, (push, add), sending.source.rows)

    def _program(self, kind: str, device: torch.device) -> TileProgram:
        """Prove and build a program at the first call of its sizes, on all ranks. Raises RankMismatch."""
        has_kernels = device.type == "cuda" or os.environ.get(INTERPRET) == "1"
        paper = SentProgram(kind, self.sizes, self.group.world_size)
        return proven_program(self.group, paper, device, has_kernels=has_kernels)


class SentProgram(NamedTuple):
    """The `push` program of a kind, for one size of calls."""

    kind: str
    sizes: SendSizes
    ranks: int

    def declared(self) -> Declared:
        """Return the symmetric buffers and channels."""
        return Declared(*BUFFERS[self.kind](self.sizes, self.ranks))

    def schedule(self) -> Schedule:
        """Return the schedule that is proven before the program runs."""
        return schedule_of(self.kind, self.sizes, self.ranks)


def schedule_of(kind: str, sizes: SendSizes, ranks: int) -> Schedule:
    """The `push` program of a kind, `dispatch` or `combine`. Raises InputError for another kind."""
    if kind not in WRITERS:
        raise InputError(f"schedule of sent rows {kind!r}", "there is no such kind", f"Use one of {', '.join(WRITERS)}")
    buffers, channels = BUFFERS[kind](sizes, ranks)
    m = ranks * sizes.shard
    callers = {
        "dispatch": {
            "own_counts": CallersMatrix(ranks, ranks + 1, "counts", is_shard=True),
            "own_rows": CallersMatrix(m, sizes.words, "landed", is_shard=True),
            "received": CallersMatrix(m, sizes.words, "received", is_result=True),
        },
        "combine": {
            "received": CallersMatrix(m, sizes.words, "received"),
            "y": CallersMatrix(m, sizes.words, "y", is_shard=True, is_result=True),
        },
    }[kind]
    if kind == "dispatch" and sizes.metadata:
        callers["own_metadata"] = CallersMatrix(m, sizes.metadata, "metadata", is_shard=True)
    if kind == "combine":
        buffers["parts"] = SymmetricBuffer(m, sizes.words, torch.int32)
    on_paper = {name: replace(each, dtype=torch.float32) for name, each in buffers.items()}
    write = partial(WRITERS[kind], sizes=sizes)
    return tile_schedule(f"experts.{kind}.push", Declared(on_paper, channels), callers, ranks, write)


def _unrun(*_: Any) -> Any:
    raise AssertionError("a step on paper")


_STEPS = (RowsStep(_unrun, _unrun), RowsStep(_unrun, _unrun))


def _dispatch(
    call: TileCall, sizes: SendSizes, own_counts: Part, own_rows: Part, received: Part, own_metadata: Part | None = None
) -> None:
    given: dict[str, RowsPlace] = {"counts": own_counts, "landed": own_rows}
    write_dispatch(call, sizes, _STEPS, given | ({"metadata": own_metadata} if own_metadata else {}), received)


def _combine(call: TileCall, sizes: SendSizes, received: Part, y: Part) -> None:
    """Write a combine behind the experts, which compute a part of each token that was received."""
    parts = call.part("parts")
    made = (Access(parts, f"part.{call.rank}"),)
    call.rank_compute("experts", lambda own: None, (Access(received, "received"),), made)
    write_combine(call, sizes, _STEPS, parts, y)


WRITERS: dict[str, Callable[..., None]] = {"dispatch": _dispatch, "combine": _combine}
