"""Random right all-to-alls of blocks of rows that calls fill in part, by library and by chunks that go various ways."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from campaigns.oracle.random.drafts import Draft, Place, cut, every_credit, one, tell
from overweave.ir.schedule import Collective, Copy, Get, Put, Range, Schedule
from overweave.ir.tensors import all_to_all_result, product

# Of a piece: pushed; from a buffer that is not counted; fetched; into such a buffer; by all of them, one by one; or
# fetched where another rank brought it back to.
WAYS = ("push", "held", "kept", "landed", "hops", "lent")


class _Places(NamedTuple):
    """The buffers. kept: a copy of x whose rows are counted as its; held, landed: of rows that are not counted."""

    x: Place
    w: Place
    gathered: Place
    y: Place
    kept: Place
    held: Place
    landed: Place
    lent: Place


def exchanged(rng: Random, ranks: int, pieces: int) -> Schedule:
    """Every rank sends each a block, piece by piece or all at once, and multiplies what it got."""
    block, cols = pieces * rng.randint(1, 2), rng.randint(1, 2)
    draft, rows = Draft("exchanged", ranks), ranks * block
    places = _Places(
        draft.buffer("x", rows, cols, "input", counted="sent"),
        draft.buffer("w", cols, 1, "input"),
        draft.buffer("gathered", rows, cols, "symmetric", counted="received"),
        draft.buffer("y", rows, 1, "output", counted="received"),
        draft.buffer("kept", rows, cols, "symmetric", counted="sent"),
        draft.buffer("held", rows, cols, "local"),
        draft.buffer("landed", rows, cols, "symmetric"),
        draft.buffer("lent", ranks * rows * pieces, cols, "symmetric"),
    )
    for queue in ("main", "copies", "gets"):
        draft.queue(queue)
    for rank in range(ranks):
        for to in range(ranks):
            draft.give(places.x(rank, (to * block, (to + 1) * block)), all_to_all_result("a", to), rank * block, 0)
        draft.give(places.w(rank), "b", 0, rank)
        draft.want(places.y(rank), product(all_to_all_result("a", rank), "b"), 0, rank, ((0, cols),))
    if rng.random() < 0.3:
        _at_once(rng, draft, places, block)
    else:
        _in_chunks(rng, draft, places, (block, pieces))
    return draft.schedule(every_credit(ranks))


def _at_once(rng: Random, draft: Draft, places: _Places, block: int) -> None:
    """The library exchanges all blocks; they may be copied before, and again behind it."""
    ranks, is_kept, is_staged = draft.ranks, rng.random() < 0.5, rng.random() < 0.5
    for rank in range(ranks):
        blocks = [(one * block, (one + 1) * block) for one in range(ranks)]
        if is_kept:
            draft.move(Copy, (rank, "main"), (places.x(rank), places.kept(rank)))
        source = places.kept if is_kept else places.x
        draft.add(
            Collective, "exchange", (rank, "main"),
            function="all_to_all", label="exchange", ranks=tuple(range(ranks)),
            sources=tuple(source(rank, rows) for rows in blocks),
            destinations=tuple(places.gathered(rank, rows) for rows in blocks),
        )  # fmt: skip
        for rows in blocks if is_staged else ():
            draft.move(Copy, (rank, "main"), (places.gathered(rank, rows), places.landed(rank, rows)))
            draft.multiply((rank, "main"), (places.landed(rank, rows), places.w(rank), places.y(rank, rows)))
        if not is_staged:
            draft.multiply((rank, "main"), (places.gathered(rank), places.w(rank), places.y(rank)))


class _Piece(NamedTuple):
    """A piece of a block. signal: its number among those for a target. number: among all. spot: where it is held."""

    source: int
    target: int
    rows: Range
    signal: int
    number: int
    way: str
    helper: int
    spot: int


def _in_chunks(rng: Random, draft: Draft, places: _Places, sizes: tuple[int, int]) -> None:
    """Each piece of a block goes its way."""
    pieces = list(_pieces(rng, draft.ranks, *sizes))
    for pad, size in (("arrived", draft.ranks), ("ready", draft.ranks), ("there", draft.ranks**2)):
        draft.pad(pad, size * sizes[1])
    block = sizes[0]
    for rank in range(draft.ranks):
        others = [its for its in rng.sample(pieces, len(pieces)) if its.source != its.target]
        for piece in (its for its in others if its.source == rank):
            _send(draft, places, piece, block)
        for piece in (its for its in others if its.helper == rank and its.way == "lent"):
            ends = places.lent(rank, _of_number(piece, block)), places.kept(piece.source, _sent(piece, block))
            draft.move(
                Put, (rank, "copies"), ends, one("there", piece.number), tell("ready", piece.target, piece.signal)
            )
        for piece in (its for its in others if its.target == rank and its.way in ("kept", "lent")):
            ends = places.kept(piece.source, _sent(piece, block)), places.gathered(rank, _got(piece, block))
            draft.move(Get, (rank, "gets"), ends, one("ready", piece.signal), tell("arrived", rank, piece.signal))
        for piece in (its for its in pieces if its.target == rank):
            rows, waits = _got(piece, block), one("arrived", piece.signal)
            source = places.landed(rank, rows) if piece.way == "hops" else places.gathered(rank, rows)
            if piece.source == rank:
                source, waits = places.x(rank, rows), ()
            elif piece.way == "landed":
                draft.move(Copy, (rank, "main"), (places.landed(rank, rows), source), waits)
                waits = ()
            draft.multiply((rank, "main"), (source, places.w(rank), places.y(rank, rows)), waits)


def _pieces(rng: Random, ranks: int, block: int, count: int) -> Iterator[_Piece]:
    """All pieces. Where those of a source are held they lie in any order."""
    parts, number = cut((0, block), count), 0
    for source in range(ranks):
        keys = [(target, at) for target in range(ranks) for at in range(count)]
        rng.shuffle(keys)
        spot = 0
        for target, at in keys:
            helper = rng.choice([rank for rank in range(ranks) if rank != source])
            yield _Piece(source, target, parts[at], source * count + at, number, rng.choice(WAYS), helper, spot)
            spot, number = spot + parts[at][1] - parts[at][0], number + 1


def _send(draft: Draft, places: _Places, piece: _Piece, block: int) -> None:
    """What a piece's source does with it."""
    rank, peer, way, source = piece.source, piece.target, piece.way, places.x(piece.source, _sent(piece, block))
    kept = places.kept(rank, source.rows)
    held = places.held(rank, (piece.spot, piece.spot + piece.rows[1] - piece.rows[0]))
    if way == "kept":
        draft.move(Copy, (rank, "copies"), (source, kept), (), tell("ready", peer, piece.signal))
        return
    if way == "lent":
        lent = places.lent(piece.helper, _of_number(piece, block))
        draft.move(Put, (rank, "copies"), (source, lent), (), tell("there", piece.helper, piece.number))
        return
    for hop in {"held": (held,), "hops": (held, kept)}.get(way, ()):
        draft.move(Copy, (rank, "copies"), (source, hop))
        source = hop
    landing = (places.landed if way in ("landed", "hops") else places.gathered)(peer, _got(piece, block))
    draft.move(Put, (rank, "copies"), (source, landing), (), tell("arrived", peer, piece.signal))


def _sent(piece: _Piece, block: int) -> Range:
    return _shifted(piece.rows, piece.target * block)


def _got(piece: _Piece, block: int) -> Range:
    return _shifted(piece.rows, piece.source * block)


def _of_number(piece: _Piece, block: int) -> Range:
    """A place of its own among the pieces of all."""
    return _shifted(piece.rows, piece.number * block - piece.rows[0])


def _shifted(rows: Range, by: int) -> Range:
    return rows[0] + by, rows[1] + by
