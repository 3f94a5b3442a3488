"""Random right schedules that sum products: in slots, round a ring, at the owner in turn or in any order."""

from __future__ import annotations

from random import Random

from campaigns.oracle.random.drafts import Draft, Place, Sharding, Waits, every_credit, one, rotation, tell
from overweave.ir.schedule import Compute, Copy, Credit, Put, Reduce, ReducePut, Region, Schedule, Wait


def _buffers(draft: Draft, deal: Sharding) -> tuple[Place, Place, Place, Place]:
    """x, w, the partials, and y of a rank."""
    return (
        draft.buffer("x", deal.m, deal.k, "input"),
        draft.buffer("w", deal.k, deal.n, "input"),
        draft.buffer("partial", deal.m, deal.n, "local"),
        draft.buffer("y", deal.size, deal.n, "output"),
    )


def scatter(rng: Random, ranks: int, pieces: int) -> Schedule:
    """Products are put into a slot per source at their owner, which sums the slots in rank order."""
    deal = Sharding.draw(rng, ranks, pieces)
    draft = Draft("scatter", ranks)
    x, w, partial, y = _buffers(draft, deal)
    slots = draft.buffer("slots", ranks * deal.size, deal.n, "symmetric")
    draft.pad("computed", ranks * pieces)
    draft.pad("arrived", ranks * pieces)
    draft.queue("tiles", "issue")
    draft.queue("copies")
    draft.queue("sums", "issue", rng.choice(((), ("tiles",))))
    for rank in range(ranks):
        draft.give_split(rank, deal, x(rank), w(rank))
        own_tiles = {}
        for owner in [*rotation(rng, rank, ranks), rank]:
            base = deal.shard(owner)[0] - rank * deal.size
            for piece, rows in enumerate(deal.pieces(owner)):
                if rows[0] == rows[1]:
                    continue
                tiles, signal = rng.randint(1, 3), owner * pieces + piece
                parts = x(rank, rows), w(rank), partial(rank, rows)
                draft.multiply((rank, "tiles"), parts, (), tell("computed", rank, signal), tiles)
                if owner == rank:
                    own_tiles[piece] = tiles
                else:
                    moved = partial(rank, rows), slots(owner, rows, base)
                    notifies = tell("arrived", owner, piece * ranks + rank)
                    draft.move(Put, (rank, "copies"), moved, one("computed", signal, tiles), notifies)
        for piece, tiles in own_tiles.items():
            _sum(draft, deal, (rank, piece, tiles), (partial, slots, y))
        draft.want_shard(deal, rank, y, list(range(ranks)))
    return draft.schedule(every_credit(ranks))


def _sum(draft: Draft, deal: Sharding, which: tuple[int, int, int], places: tuple[Place, Place, Place]) -> None:
    """The sum of one own piece. which: rank, piece, and its own tiles."""
    rank, piece, tiles = which
    partial, slots, y = places
    rows, lo, ranks = deal.pieces(rank)[piece], deal.shard(rank)[0], deal.ranks
    first, last = piece * ranks, (piece + 1) * ranks
    ranges = [(first, first + rank), (first + rank + 1, last)]
    arrived = tuple(Wait("arrived", signals, 1) for signals in ranges if signals[0] < signals[1])
    operands = [
        partial(rank, rows) if source == rank else slots(rank, rows, lo - source * deal.size) for source in range(ranks)
    ]
    draft.add(
        Reduce,
        "sum",
        (rank, "sums"),
        (*one("computed", rank * deal.count + piece, tiles), *arrived),
        operands=tuple(operands),
        out=y(rank, rows, lo),
    )


def scatter_into_tiles(rng: Random, ranks: int, pieces: int) -> Schedule:
    """As `scatter`, but the owner's own tiles add what arrived to their products, at their own place in the order.

    They read `x` in place, or a copy of it that they wait for before they start.
    """
    deal = Sharding.draw(rng, ranks, pieces)
    draft = Draft("scatter_into_tiles", ranks)
    x, w, partial, y = _buffers(draft, deal)
    slots = draft.buffer("slots", ranks * deal.size, deal.n, "symmetric")
    draft.pad("computed", ranks * pieces)
    draft.pad("arrived", ranks * pieces)
    draft.queue("tiles", rng.choice(("issue", "complete")))
    draft.queue("copies")
    staged = None
    if rng.random() < 0.6:
        draft.queue("main")
        draft.pad("staged", pieces)
        staged = draft.buffer("staged", deal.m, deal.k, "local")
    for rank in range(ranks):
        draft.give_split(rank, deal, x(rank), w(rank))
        for owner in rotation(rng, rank, ranks):
            base = deal.shard(owner)[0] - rank * deal.size
            for piece, rows in enumerate(deal.pieces(owner)):
                if rows[0] < rows[1]:
                    tiles, signal = rng.randint(1, 2), owner * pieces + piece
                    parts = x(rank, rows), w(rank), partial(rank, rows)
                    draft.multiply((rank, "tiles"), parts, (), tell("computed", rank, signal), tiles)
                    moved = partial(rank, rows), slots(owner, rows, base)
                    notifies = tell("arrived", owner, piece * ranks + rank)
                    draft.move(Put, (rank, "copies"), moved, one("computed", signal, tiles), notifies)
        for piece, rows in enumerate(deal.pieces(rank)):
            if rows[0] < rows[1]:
                waits: Waits = ()
                a = x(rank, rows)
                if staged:
                    draft.move(Copy, (rank, "main"), (a, staged(rank, rows)), (), tell("staged", rank, piece))
                    a, waits = staged(rank, rows), one("staged", piece)
                _add_own(draft, deal, (rank, piece, waits), (a, w(rank), slots, y))
        draft.want_shard(deal, rank, y, list(range(ranks)))
    return draft.schedule(every_credit(ranks))


def _add_own(
    draft: Draft, deal: Sharding, which: tuple[int, int, Waits], parts: tuple[Region, Region, Place, Place]
) -> None:
    """The own product of one piece, and the sum. which: rank and piece, and what the product waits for."""
    (rank, piece, waits), (a, b, slots, y) = which, parts
    rows, lo = deal.pieces(rank)[piece], deal.shard(rank)[0]
    first = piece * deal.ranks
    ranges = [(first, first + rank), (first + rank + 1, first + deal.ranks)]
    sources = [source for source in range(deal.ranks) if source != rank]
    draft.add(
        Compute,
        "add",
        (rank, "tiles"),
        waits,
        a=(a,),
        b=b,
        out=(y(rank, rows, lo),),
        addends=tuple(slots(rank, rows, lo - source * deal.size) for source in sources),
        place=rank,
        late_waits=tuple(Wait("arrived", signals, 1) for signals in ranges if signals[0] < signals[1]),
    )


def ring(rng: Random, ranks: int, pieces: int) -> Schedule:
    """Each piece travels from its owner's successor round to the owner; every rank on the way adds its product.

    Only neighbours share memory, so only neighbours give credit. Sums are kept apart, or where the piece arrived.
    """
    deal = Sharding.draw(rng, ranks, pieces, even=True)
    draft = Draft("ring", ranks)
    x, w, partial, y = _buffers(draft, deal)
    slots = draft.buffer("slots", deal.m, deal.n, "symmetric")
    running = slots if rng.random() < 0.5 else draft.buffer("running", deal.m, deal.n, "local")
    draft.pad("arrived", ranks * pieces)
    draft.pad("ready", ranks * pieces)
    draft.queue("main")
    draft.queue("copies")
    for rank in range(ranks):
        draft.give_split(rank, deal, x(rank), w(rank))
        following = (rank + 1) % ranks
        for step in range(1, ranks + 1):
            owner = (rank - step) % ranks
            for piece, rows in enumerate(deal.pieces(owner)):
                signal, starts, ends = owner * pieces + piece, step == 1, owner == rank
                ready = () if ends else tell("ready", rank, signal)
                parts = x(rank, rows), w(rank), partial(rank, rows)
                draft.multiply((rank, "main"), parts, (), ready if starts else ())
                out = y(rank, rows, deal.shard(owner)[0]) if ends else running(rank, rows)
                if not starts:
                    operands = slots(rank, rows), partial(rank, rows)
                    draft.add(Reduce, "sum", (rank, "main"), one("arrived", signal), ready, operands=operands, out=out)
                if not ends:
                    moved = partial(rank, rows) if starts else out, slots(following, rows)
                    notifies = tell("arrived", following, signal)
                    draft.move(Put, (rank, "copies"), moved, one("ready", signal), notifies)
        draft.want_shard(deal, rank, y, [(rank + step) % ranks for step in range(1, ranks + 1)])
    return draft.schedule(tuple(Credit((rank + 1) % ranks, rank) for rank in range(ranks)))


def add_in_turn(rng: Random, ranks: int, pieces: int) -> Schedule:
    """The owner of a piece computes its part; then one peer after the other adds its own from afar."""
    deal = Sharding.draw(rng, ranks, pieces, even=True)
    draft = Draft("add_in_turn", ranks)
    x, w, partial, y = _buffers(draft, deal)
    total = draft.buffer("total", deal.size, deal.n, "symmetric")
    draft.pad("turn", ranks * pieces)
    draft.queue("main")
    for rank in range(ranks):
        draft.give_split(rank, deal, x(rank), w(rank))
        draft.want_shard(deal, rank, y, [(rank + turn) % ranks for turn in range(ranks)])
    for turn in range(ranks + 1):
        for rank in range(ranks):
            owner, at = (rank - turn) % ranks, (rank, "main")
            lo = deal.shard(owner)[0]
            for piece, rows in enumerate(deal.pieces(owner)):
                signal, at_owner = owner * pieces + piece, total(owner, rows, lo)
                waits, notifies = one("turn", signal), tell("turn", (rank + 1) % ranks, signal)
                if turn == 0:
                    draft.multiply(at, (x(rank, rows), w(rank), at_owner), (), notifies)
                elif turn < ranks:
                    draft.multiply(at, (x(rank, rows), w(rank), partial(rank, rows)))
                    draft.move(ReducePut, at, (partial(rank, rows), at_owner), waits, notifies)
                else:
                    draft.move(Copy, at, (at_owner, y(rank, rows, lo)), waits)
    return draft.schedule(every_credit(ranks))


def add_in_any_order(rng: Random, ranks: int, pieces: int) -> Schedule:
    """Every piece of a peer's shard is multiplied and added at its owner, who adds its own part in the end."""
    deal = Sharding.draw(rng, ranks, pieces)
    draft = Draft("add_in_any_order", ranks)
    x, w, partial, y = _buffers(draft, deal)
    total = draft.buffer("total", deal.size, deal.n, "symmetric")
    draft.pad("cleared", ranks)
    draft.pad("computed", ranks * pieces)
    draft.pad("arrived", ranks * pieces)
    draft.queue("main")
    draft.queue("copies")
    for rank in range(ranks):
        draft.give_split(rank, deal, x(rank), w(rank))
        draft.want_shard(deal, rank, y, rng.sample(range(ranks), ranks))
        draft.want_in_any_order()
        lo, hi = deal.shard(rank)
        peers = rotation(rng, rank, ranks)
        told = tuple(signal for peer in peers for signal in tell("cleared", peer, rank))
        draft.clear((rank, "main"), total(rank, (0, hi - lo)), told)
        for peer in peers:
            for piece, rows in enumerate(deal.pieces(peer)):
                signal = peer * pieces + piece
                done = tell("computed", rank, signal)
                draft.multiply((rank, "main"), (x(rank, rows), w(rank), partial(rank, rows)), (), done)
                moved = partial(rank, rows), total(peer, rows, deal.shard(peer)[0])
                waits = (*one("computed", signal), *one("cleared", peer))
                arrived = tell("arrived", peer, rank * pieces + piece)
                draft.move(ReducePut, (rank, "copies"), moved, waits, arrived)
                draft.in_any_order()
        draft.multiply((rank, "main"), (x(rank, (lo, hi)), w(rank), partial(rank, (lo, hi))))
        here = [one("arrived", peer * pieces + piece) for peer in peers for piece in range(pieces)]
        draft.add(
            Reduce,
            "sum",
            (rank, "main"),
            tuple(wait for waits in here for wait in waits),
            operands=(total(rank, (0, hi - lo)), partial(rank, (lo, hi))),
            out=y(rank, (0, hi - lo)),
        )
    return draft.schedule(every_credit(ranks))
