"""Random right schedules that move inputs: all-gathers by put, get and library, and an all-to-all into outputs."""

from __future__ import annotations

from random import Random

from campaigns.oracle.random.drafts import Draft, Place, Sharding, cut, every_credit, one, rotation, tell
from overweave.ir.schedule import Collective, Compute, Copy, Get, Notify, Put, Retire, Schedule
from overweave.ir.tensors import product


def gather(rng: Random, ranks: int, pieces: int) -> Schedule:
    """All-gather in row pieces by put or get, over a few copy queues, multiplied piece by piece as they arrive."""
    deal = Sharding.draw(rng, ranks, pieces)
    draft = Draft("gather", ranks)
    x, w = draft.buffer("x", deal.size, deal.k, "input"), draft.buffer("w", deal.k, deal.n, "input")
    gathered = draft.buffer("gathered", deal.m, deal.k, "symmetric")
    y = draft.buffer("y", deal.m, deal.n, "output")
    draft.pad("arrived", ranks * pieces)
    draft.queue("tiles", rng.choice(("issue", "complete")))
    copies = [f"copies.{index}" for index in range(rng.randint(1, 3))]
    staged, tiles = None, rng.choice((1, 1, 2, 3))
    for queue in copies:
        draft.queue(queue, "complete" if tiles == 1 else "issue")
    if tiles == 1 and rng.random() < 0.5:
        draft.pad("ready", ranks)
        draft.queue("main")
        staged = draft.buffer("staged", deal.size, deal.k, "symmetric")
    for rank in range(ranks):
        lo, hi = deal.shard(rank)
        draft.give_gathered(rank, deal, x(rank, (0, hi - lo)), w(rank))
        peers = rotation(rng, rank, ranks)
        if staged:
            _pull(draft, deal, rank, peers, (x, staged, gathered), rng.choice(copies))
        else:
            for peer in peers:
                for piece, rows in enumerate(deal.pieces(rank)):
                    notifies = tell("arrived", peer, rank * pieces + piece)
                    draft.move(Put, (rank, rng.choice(copies)), (x(rank, rows, lo), gathered(peer, rows)), (), notifies)
                    draft.in_tiles(tiles)
        own = (x(rank, (0, hi - lo)), w(rank), y(rank, (lo, hi)))
        draft.multiply((rank, "tiles"), own, tiles=rng.randint(1, 3))
        for peer in peers:
            for piece, rows in enumerate(deal.pieces(peer)):
                waits = one("arrived", peer * pieces + piece, tiles)
                if rows[0] == rows[1]:
                    draft.idle((rank, copies[0]), waits)
                else:
                    parts = gathered(rank, rows), w(rank), y(rank, rows)
                    draft.multiply((rank, "tiles"), parts, waits, tiles=rng.randint(1, 3))
        draft.want(y(rank), product("a", "b"), 0, rank * deal.n, ((0, deal.k),))
    return draft.schedule(every_credit(ranks))


def _pull(
    draft: Draft, deal: Sharding, rank: int, peers: list[int], places: tuple[Place, Place, Place], queue: str
) -> None:
    """Stages the own shard, says so, and gets the peers' pieces."""
    x, staged, gathered = places
    lo, hi = deal.shard(rank)
    ready = tuple(Notify("ready", peer, rank) for peer in peers)
    draft.move(Copy, (rank, "main"), (x(rank, (0, hi - lo)), staged(rank, (0, hi - lo))), (), ready)
    for peer in peers:
        for piece, rows in enumerate(deal.pieces(peer)):
            parts = staged(peer, rows, deal.shard(peer)[0]), gathered(rank, rows)
            notifies = tell("arrived", rank, peer * deal.count + piece)
            draft.move(Get, (rank, queue), parts, one("ready", peer), notifies)


def gather_columns(rng: Random, ranks: int, pieces: int) -> Schedule:
    """Column pieces are put; each adds its part of the reduced axis to the product, in order."""
    deal = Sharding.draw(rng, ranks, pieces, even=True)
    depth = deal.k * pieces
    draft = Draft("gather_columns", ranks)
    x, w = draft.buffer("x", deal.size, depth, "input"), draft.buffer("w", depth, deal.n, "input")
    gathered = draft.buffer("gathered", deal.m, depth, "symmetric")
    y = draft.buffer("y", deal.m, deal.n, "output")
    draft.pad("arrived", ranks * pieces)
    draft.queue("main")
    draft.queue("copies")
    ranges = cut((0, depth), pieces)
    for rank in range(ranks):
        draft.give_gathered(rank, deal, x(rank), w(rank))
        peers = rotation(rng, rank, ranks)
        for piece, cols in enumerate(ranges):
            for peer in peers:
                parts = x(rank, cols=cols), gathered(peer, deal.shard(rank), cols=cols)
                draft.move(Put, (rank, "copies"), parts, (), tell("arrived", peer, rank * pieces + piece))
        for piece, cols in enumerate(ranges):
            for source in [rank, *peers]:
                rows, at = deal.shard(source), (rank, "main")
                a = x(rank, cols=cols) if source == rank else gathered(rank, rows, cols=cols)
                waits = () if source == rank else one("arrived", source * pieces + piece)
                out, adds = (y(rank, rows),), piece > 0
                draft.add(Compute, "multiply", at, waits, a=(a,), b=w(rank, cols), out=out, accumulate=adds)
        draft.want(y(rank), product("a", "b"), 0, rank * deal.n, ranges)
    return draft.schedule(every_credit(ranks))


def collectives(rng: Random, ranks: int, pieces: int) -> Schedule:
    """A library all-gather of each piece, then a matmul of it."""
    deal = Sharding.draw(rng, ranks, pieces, even=True)
    draft = Draft("collectives", ranks)
    members = tuple(range(ranks))
    x, w = draft.buffer("x", deal.size, deal.k, "input"), draft.buffer("w", deal.k, deal.n, "input")
    gathered = draft.buffer("gathered", deal.m, deal.k, "local")
    y = draft.buffer("y", deal.m, deal.n, "output")
    draft.queue("main")
    draft.queue("library", "complete", ("main",))
    draft.pad("gathered", pieces)
    for rank in range(ranks):
        lo = deal.shard(rank)[0]
        draft.give_gathered(rank, deal, x(rank), w(rank))
        for piece in range(pieces):
            parts = [deal.pieces(member)[piece] for member in members]
            draft.add(
                Collective,
                "all_gather",
                (rank, "library"),
                (),
                tell("gathered", rank, piece),
                function="all_gather",
                label=f"piece.{piece}",
                ranks=members,
                sources=(x(rank, parts[rank], lo),),
                destinations=tuple(gathered(rank, rows) for rows in parts),
            )
        for piece in range(pieces):
            parts = [deal.pieces(member)[piece] for member in members]
            a, out = tuple(gathered(rank, rows) for rows in parts), tuple(y(rank, rows) for rows in parts)
            draft.add(Compute, "multiply", (rank, "main"), one("gathered", piece), a=a, b=w(rank), out=out)
        draft.want(y(rank), product("a", "b"), 0, rank * deal.n, ((0, deal.k),))
    return draft.schedule(())


def into_outputs(rng: Random, ranks: int, pieces: int) -> Schedule:
    """All-to-all straight into the callers' outputs: each says when its call has begun, and waits for all to arrive."""
    deal = Sharding.draw(rng, ranks, pieces, even=True)
    draft = Draft("into_outputs", ranks)
    x, y = draft.buffer("x", deal.m, deal.k, "input"), draft.buffer("y", deal.m, deal.k, "output")
    draft.pad("begun", ranks)
    draft.pad("arrived", ranks * pieces)
    draft.queue("main")
    draft.queue("copies")
    for rank in range(ranks):
        own, landing = deal.shard(rank), deal.pieces(rank)
        peers = rotation(rng, rank, ranks)
        draft.give(x(rank), "a", rank * deal.m, 0)
        begun = tuple(Notify("begun", peer, rank) for peer in peers)
        draft.move(Copy, (rank, "main"), (x(rank, own), y(rank, own)), (), begun)
        for peer in peers:
            for piece, rows in enumerate(deal.pieces(peer)):
                notifies = tell("arrived", peer, rank * pieces + piece)
                draft.move(
                    Put, (rank, "copies"), (x(rank, rows), y(peer, landing[piece])), one("begun", peer), notifies
                )
        for peer in peers:
            for piece in range(pieces):
                draft.idle((rank, "main"), one("arrived", peer * pieces + piece))
        for source in range(ranks):
            draft.want(y(rank, deal.shard(source)), "a", source * deal.m + own[0], 0, ())
    return draft.schedule(every_credit(ranks))


def gather_by_turns(rng: Random, ranks: int, pieces: int) -> Schedule:
    """Each rank's shard goes to the next rank in pieces, through a slot or two that they use by turns: retired once
    they are multiplied, in the tiles' queue or beside it."""
    slots = rng.choice((1, 2))
    deal = Sharding.draw(rng, ranks, pieces + slots, even=True)
    draft = Draft("gather_by_turns", ranks)
    x, w = draft.buffer("x", deal.size, deal.k, "input"), draft.buffer("w", deal.k, deal.n, "input")
    height = deal.size // deal.count
    slot, y = draft.buffer("slot", slots * height, deal.k, "symmetric"), draft.buffer("y", deal.size, deal.n, "output")
    for pad in ("arrived", "multiplied", "free"):
        draft.pad(pad, deal.count)
    for queue in ("copies", "ends"):
        draft.queue(queue)
    beside = rng.random() < 0.5
    draft.queue("tiles", rng.choice(("issue", "complete")) if beside else "complete")
    for rank in range(ranks):
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        (lo, hi), tiles = deal.shard(rank), rng.randint(1, 2)
        draft.give_gathered(rank, deal, x(rank, (0, hi - lo)), w(rank))
        for piece, rows in enumerate(deal.pieces(rank)):
            turn = (piece % slots * height, (piece % slots + 1) * height)
            waits, told = one("free", piece - slots) if piece >= slots else (), tell("arrived", after, piece)
            draft.move(Put, (rank, "copies"), (x(rank, rows, lo), slot(after, turn)), waits, told)
            parts = slot(rank, turn), w(rank), y(rank, (piece * height, (piece + 1) * height))
            is_last = piece >= deal.count - slots
            told = tell("multiplied", rank, piece) if beside and not is_last else ()
            draft.multiply((rank, "tiles"), parts, one("arrived", piece), told, tiles=tiles)
            if not is_last:
                at, waits = ((rank, "ends"), one("multiplied", piece, tiles)) if beside else ((rank, "tiles"), ())
                draft.add(Retire, "retire", at, waits, tell("free", before, piece), regions=(slot(rank, turn),))
        first = deal.shard(before)[0]
        draft.want(y(rank), product("a", "b"), first, rank * deal.n, ((0, deal.k),))
    return draft.schedule(every_credit(ranks))
