"""Random schedules that are right by construction: the ground that verify's campaigns stand on.

Each template draws shapes (uneven and empty shards too), orders, queues and tile counts, and is filled with as many
pieces as are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from msgspec import Struct

from campaigns.drafts import Draft, Sharding, cut, every_credit, rotation
from overweave.ir.schedule import (
    Collective,
    Compute,
    Copy,
    Credit,
    Get,
    Notify,
    Put,
    Reduce,
    ReducePut,
    Schedule,
    Wait,
    product,
)


def _one(pad: str, signal: int, count: int = 1) -> tuple[Wait, ...]:
    return (Wait(pad, (signal, signal + 1), count),)


def gather(rng: Random, ranks: int, pieces: int) -> Schedule:
    """All-gather by push or pull in row pieces, multiplied piece by piece as they arrive."""
    deal = Sharding.draw(rng, ranks, pieces)
    pulls, queues = rng.random() < 0.5, rng.randint(1, 3)
    draft = Draft("gather", ranks)
    x, w = draft.buffer("x", deal.size, deal.k, "input"), draft.buffer("w", deal.k, deal.n, "input")
    gathered = draft.buffer("gathered", deal.m, deal.k, "symmetric")
    y = draft.buffer("y", deal.m, deal.n, "output")
    draft.pad("arrived", ranks * pieces)
    draft.queue("tiles", rng.choice(("issue", "complete")))
    for index in range(queues):
        draft.queue(f"copies.{index}", "complete")
    if pulls:
        draft.pad("ready", ranks)
        draft.queue("main", "complete")
        staged = draft.buffer("staged", deal.size, deal.k, "symmetric")
    for rank in range(ranks):
        lo, hi = deal.shard(rank)
        draft.give(x(rank, (0, hi - lo)), "a", lo, 0)
        draft.give(w(rank), "b", 0, rank * deal.n)
        peers = rotation(rng, rank, ranks)
        if pulls and peers:
            notifies = tuple(Notify("ready", peer, rank) for peer in peers)
            own = (x(rank, (0, hi - lo)),), (staged(rank, (0, hi - lo)),)
            draft.add(Copy, rank, "main", notifies=notifies, sources=own[0], destinations=own[1])
        for peer in peers:
            for piece, rows in enumerate(deal.pieces(peer if pulls else rank)):
                queue = f"copies.{rng.randrange(queues)}"
                if pulls:
                    first = deal.shard(peer)[0]
                    draft.add(
                        Get, rank, queue, waits=_one("ready", peer),
                        notifies=(Notify("arrived", rank, peer * pieces + piece),),
                        sources=(staged(peer, rows, first),), destinations=(gathered(rank, rows),),
                    )  # fmt: skip
                else:
                    draft.add(
                        Put, rank, queue, notifies=(Notify("arrived", peer, rank * pieces + piece),),
                        sources=(x(rank, rows, lo),), destinations=(gathered(peer, rows),),
                    )  # fmt: skip
        if lo < hi:
            draft.add(
                Compute,
                rank,
                "tiles",
                a=(x(rank, (0, hi - lo)),),
                b=w(rank),
                out=(y(rank, (lo, hi)),),
                tiles=deal.tiles(),
            )
        for peer in peers:
            for piece, rows in enumerate(deal.pieces(peer)):
                waits = _one("arrived", peer * pieces + piece)
                if rows[0] == rows[1]:
                    draft.add(Copy, rank, "copies.0", waits=waits, sources=(), destinations=())
                else:
                    parts = (gathered(rank, rows),), (y(rank, rows),)
                    draft.add(
                        Compute, rank, "tiles", waits=waits, a=parts[0], b=w(rank), out=parts[1], tiles=deal.tiles()
                    )
        if deal.m:
            draft.want(y(rank), product("a", "b"), 0, rank * deal.n, ((0, deal.k),))
    return draft.schedule(every_credit(ranks))


def gather_columns(rng: Random, ranks: int, pieces: int) -> Schedule:
    """Column pieces are pushed; each adds its part of the reduced axis to the product, in order."""
    deal = Sharding.draw(rng, ranks, pieces, even=True)
    depth = deal.k * pieces
    draft = Draft("gather_columns", ranks)
    x, w = draft.buffer("x", deal.size, depth, "input"), draft.buffer("w", depth, deal.n, "input")
    gathered = draft.buffer("gathered", deal.m, depth, "symmetric")
    y = draft.buffer("y", deal.m, deal.n, "output")
    draft.pad("arrived", ranks * pieces)
    draft.queue("main", "complete")
    draft.queue("copies", "complete")
    ranges = cut((0, depth), pieces)
    for rank in range(ranks):
        lo, hi = deal.shard(rank)
        draft.give(x(rank), "a", lo, 0)
        draft.give(w(rank), "b", 0, rank * deal.n)
        peers = rotation(rng, rank, ranks)
        for piece, cols in enumerate(ranges):
            for peer in peers:
                draft.add(
                    Put, rank, "copies", notifies=(Notify("arrived", peer, rank * pieces + piece),),
                    sources=(x(rank, cols=cols),), destinations=(gathered(peer, (lo, hi), cols=cols),),
                )  # fmt: skip
        for piece, cols in enumerate(ranges):
            for source in [rank, *peers]:
                rows, b = deal.shard(source), w(rank, cols)
                a = x(rank, cols=cols) if source == rank else gathered(rank, rows, cols=cols)
                waits = () if source == rank else _one("arrived", source * pieces + piece)
                draft.add(Compute, rank, "main", waits=waits, a=(a,), b=b, out=(y(rank, rows),), accumulate=piece > 0)
        draft.want(y(rank), product("a", "b"), 0, rank * deal.n, ranges)
    return draft.schedule(every_credit(ranks))


def scatter(rng: Random, ranks: int, pieces: int) -> Schedule:
    """Products are pushed into a slot per source at their owner, which sums the slots in rank order."""
    deal = Sharding.draw(rng, ranks, pieces)
    after = rng.choice(((), ("tiles",)))
    draft = Draft("scatter", ranks)
    x, w = draft.buffer("x", deal.m, deal.k, "input"), draft.buffer("w", deal.k, deal.n, "input")
    partial = draft.buffer("partial", deal.m, deal.n, "local")
    slots = draft.buffer("slots", ranks * deal.size, deal.n, "symmetric")
    y = draft.buffer("y", deal.size, deal.n, "output")
    draft.pad("computed", ranks * pieces)
    draft.pad("arrived", ranks * pieces)
    draft.queue("tiles", "issue")
    draft.queue("copies", "complete")
    draft.queue("sums", "issue", after)
    tiles = {
        (rank, owner, piece): deal.tiles() for rank in range(ranks) for owner in range(ranks) for piece in range(pieces)
    }
    for rank in range(ranks):
        draft.give(x(rank), "a", 0, rank * deal.k)
        draft.give(w(rank), "b", rank * deal.k, 0)
        for owner in [*rotation(rng, rank, ranks), rank]:
            base = rank * deal.size - deal.shard(owner)[0]
            for piece, rows in enumerate(deal.pieces(owner)):
                if rows[0] == rows[1]:
                    continue
                count, signal = tiles[rank, owner, piece], owner * pieces + piece
                draft.add(
                    Compute, rank, "tiles", notifies=(Notify("computed", rank, signal),),
                    a=(x(rank, rows),), b=w(rank), out=(partial(rank, rows),), tiles=count,
                )  # fmt: skip
                if owner != rank:
                    draft.add(
                        Put, rank, "copies", waits=_one("computed", signal, count),
                        notifies=(Notify("arrived", owner, piece * ranks + rank),),
                        sources=(partial(rank, rows),), destinations=(slots(owner, rows, -base),),
                    )  # fmt: skip
        lo = deal.shard(rank)[0]
        for piece, rows in enumerate(deal.pieces(rank)):
            if rows[0] == rows[1]:
                continue
            waits = [Wait("computed", (rank * pieces + piece,) * 2, 1)]
            waits = list(_one("computed", rank * pieces + piece, tiles[rank, rank, piece]))
            for first, last in ((0, rank), (rank + 1, ranks)):
                if first < last:
                    waits.append(Wait("arrived", (piece * ranks + first, piece * ranks + last), 1))
            operands = tuple(
                partial(rank, rows) if source == rank else slots(rank, rows, lo - source * deal.size)
                for source in range(ranks)
            )
            draft.add(Reduce, rank, "sums", waits=tuple(waits), operands=operands, out=y(rank, rows, lo))
        draft.want_shard(deal, rank, y, tuple((source * deal.k, (source + 1) * deal.k) for source in range(ranks)))
    return draft.schedule(every_credit(ranks))


def ring(rng: Random, ranks: int, pieces: int) -> Schedule:
    """Each piece travels from its owner's successor round to the owner; every rank on the way adds its product."""
    deal = Sharding.draw(rng, ranks, pieces, even=True)
    draft = Draft("ring", ranks)
    x, w = draft.buffer("x", deal.m, deal.k, "input"), draft.buffer("w", deal.k, deal.n, "input")
    partial = draft.buffer("partial", deal.m, deal.n, "local")
    slots = draft.buffer("slots", deal.m, deal.n, "symmetric")
    in_place = rng.random() < 0.5
    running = slots if in_place else draft.buffer("running", deal.m, deal.n, "local")
    y = draft.buffer("y", deal.size, deal.n, "output")
    draft.pad("arrived", ranks * pieces)
    draft.pad("ready", ranks * pieces)
    draft.queue("main", "complete")
    draft.queue("copies", "complete")
    for rank in range(ranks):
        draft.give(x(rank), "a", 0, rank * deal.k)
        draft.give(w(rank), "b", rank * deal.k, 0)
        for step in range(1, ranks + 1):
            owner = (rank - step) % ranks
            for piece, rows in enumerate(deal.pieces(owner)):
                signal, lo = owner * pieces + piece, deal.shard(owner)[0]
                starts, ends = step == 1, owner == rank
                ready = () if ends else (Notify("ready", rank, signal),)
                draft.add(
                    Compute, rank, "main", notifies=ready if starts else (),
                    a=(x(rank, rows),), b=w(rank), out=(partial(rank, rows),),
                )  # fmt: skip
                out = y(rank, rows, lo) if ends else running(rank, rows)
                if not starts:
                    draft.add(
                        Reduce, rank, "main", waits=_one("arrived", signal), notifies=ready,
                        operands=(slots(rank, rows), partial(rank, rows)), out=out,
                    )  # fmt: skip
                if not ends:
                    peer = (rank + 1) % ranks
                    draft.add(
                        Put, rank, "copies", waits=_one("ready", signal), notifies=(Notify("arrived", peer, signal),),
                        sources=(partial(rank, rows) if starts else out,), destinations=(slots(peer, rows),),
                    )  # fmt: skip
        order = [(rank + step) % ranks for step in range(1, ranks + 1)]
        draft.want_shard(deal, rank, y, tuple((source * deal.k, (source + 1) * deal.k) for source in order))
    return draft.schedule(tuple(Credit((rank + 1) % ranks, rank) for rank in range(ranks) if ranks > 1))


def add_in_turn(rng: Random, ranks: int, pieces: int) -> Schedule:
    """The owner of a piece computes its part; then one peer after the other adds its own from afar."""
    deal = Sharding.draw(rng, ranks, pieces, even=True)
    draft = Draft("add_in_turn", ranks)
    x, w = draft.buffer("x", deal.m, deal.k, "input"), draft.buffer("w", deal.k, deal.n, "input")
    partial = draft.buffer("partial", deal.m, deal.n, "local")
    total = draft.buffer("total", deal.size, deal.n, "symmetric")
    y = draft.buffer("y", deal.size, deal.n, "output")
    draft.pad("turn", ranks * pieces)
    draft.queue("main", "complete")
    draft.queue("copies", "complete")
    for rank in range(ranks):
        draft.give(x(rank), "a", 0, rank * deal.k)
        draft.give(w(rank), "b", rank * deal.k, 0)
    for turn in range(ranks + 1):
        for rank in range(ranks):
            owner = (rank - turn) % ranks
            lo, following = deal.shard(owner)[0], (rank + 1) % ranks
            for piece, rows in enumerate(deal.pieces(owner)):
                signal = owner * pieces + piece
                waits, notifies = _one("turn", signal), (Notify("turn", following, signal),)
                if turn == ranks:
                    last = waits if ranks > 1 else ()
                    draft.add(
                        Copy, rank, "main", waits=last,
                        sources=(total(rank, rows, lo),), destinations=(y(rank, rows, lo),),
                    )  # fmt: skip
                    continue
                own = turn == 0
                draft.add(
                    Compute, rank, "main", notifies=notifies if own and ranks > 1 else (), a=(x(rank, rows),), b=w(rank),
                    out=(total(rank, rows, lo) if own else partial(rank, rows),),
                )  # fmt: skip
                if not own:
                    # The put needs the product, which its own queue computed: it stands in that queue.
                    draft.add(
                        ReducePut, rank, "main", waits=waits, notifies=notifies,
                        sources=(partial(rank, rows),), destinations=(total(owner, rows, lo),),
                    )  # fmt: skip
    for rank in range(ranks):
        order = [(rank + turn) % ranks for turn in range(ranks)]
        draft.want_shard(deal, rank, y, tuple((source * deal.k, (source + 1) * deal.k) for source in order))
    return draft.schedule(every_credit(ranks))


def collectives(rng: Random, ranks: int, pieces: int) -> Schedule:
    """Library all-gather of each piece, a matmul of it, library reduce-scatter of the products."""
    deal = Sharding.draw(rng, ranks, pieces, even=True)
    draft = Draft("collectives", ranks)
    members = tuple(range(ranks))
    x, w = draft.buffer("x", deal.size, deal.k, "input"), draft.buffer("w", deal.k, deal.n, "input")
    gathered = draft.buffer("gathered", deal.m, deal.k, "local")
    y = draft.buffer("y", deal.m, deal.n, "output")
    draft.queue("main", "complete")
    draft.queue("library", "complete", ("main",))
    draft.pad("gathered", pieces)
    for rank in range(ranks):
        lo = deal.shard(rank)[0]
        draft.give(x(rank), "a", lo, 0)
        draft.give(w(rank), "b", 0, rank * deal.n)
        for piece in range(pieces):
            parts = [deal.pieces(member)[piece] for member in members]
            draft.add(
                Collective, rank, "library", function="all_gather", label=f"piece.{piece}", ranks=members,
                notifies=(Notify("gathered", rank, piece),), sources=(x(rank, parts[rank], lo),),
                destinations=tuple(gathered(rank, rows) for rows in parts),
            )  # fmt: skip
        for piece in range(pieces):
            parts = [deal.pieces(member)[piece] for member in members]
            a, out = tuple(gathered(rank, rows) for rows in parts), tuple(y(rank, rows) for rows in parts)
            draft.add(Compute, rank, "main", waits=_one("gathered", piece), a=a, b=w(rank), out=out)
        draft.want(y(rank), product("a", "b"), 0, rank * deal.n, ((0, deal.k),))
    return draft.schedule(())


def into_outputs(rng: Random, ranks: int, pieces: int) -> Schedule:
    """All-to-all straight into the callers' outputs: each says when its call has begun, and waits for all to arrive."""
    deal = Sharding.draw(rng, ranks, pieces, even=True)
    draft = Draft("into_outputs", ranks)
    x, y = draft.buffer("x", deal.m, deal.k, "input"), draft.buffer("y", deal.m, deal.k, "output")
    draft.pad("begun", ranks)
    draft.pad("arrived", ranks * pieces)
    draft.queue("main", "complete")
    draft.queue("copies", "complete")
    for rank in range(ranks):
        lo, hi = deal.shard(rank)
        peers = rotation(rng, rank, ranks)
        draft.give(x(rank), "a", rank * deal.m, 0)
        notifies = tuple(Notify("begun", peer, rank) for peer in peers)
        draft.add(
            Copy, rank, "main", notifies=notifies, sources=(x(rank, (lo, hi)),), destinations=(y(rank, (lo, hi)),)
        )
        for peer in peers:
            landing = deal.pieces(rank)
            for piece, rows in enumerate(deal.pieces(peer)):
                draft.add(
                    Put, rank, "copies", waits=_one("begun", peer),
                    notifies=(Notify("arrived", peer, rank * pieces + piece),),
                    sources=(x(rank, rows),), destinations=(y(peer, landing[piece]),),
                )  # fmt: skip
        for peer in peers:
            for piece in range(pieces):
                waits = _one("arrived", peer * pieces + piece)
                draft.add(Copy, rank, "main", waits=waits, sources=(), destinations=())
        for source in range(ranks):
            draft.want(y(rank, deal.shard(source)), "a", source * deal.m + lo, 0, ())
    return draft.schedule(every_credit(ranks))


class Template(Struct, frozen=True):
    """per_piece: about how many operations one more piece adds, for so many ranks."""

    make: Callable[[Random, int, int], Schedule]
    per_piece: Callable[[int], int]


TEMPLATES = (
    Template(gather, lambda ranks: 2 * ranks * max(ranks - 1, 1)),
    Template(gather_columns, lambda ranks: 2 * ranks * ranks - ranks),
    Template(scatter, lambda ranks: 2 * ranks * ranks),
    Template(ring, lambda ranks: 3 * ranks * ranks - ranks),
    Template(add_in_turn, lambda ranks: 2 * ranks * ranks),
    Template(collectives, lambda ranks: 2 * ranks),
    Template(into_outputs, lambda ranks: 2 * ranks * max(ranks - 1, 1)),
)


def random_schedule(rng: Random, ranks: int, operations: int) -> Schedule:
    """A right schedule of about so many operations on so many ranks."""
    template = rng.choice(TEMPLATES)
    return template.make(rng, ranks, max(1, round(operations / template.per_piece(ranks))))
