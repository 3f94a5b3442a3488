"""Random right schedules whose products are stored at peers, and their sums at every rank: no move carries either."""

from __future__ import annotations

from random import Random

from campaigns.oracle.random.drafts import Draft, Sharding, every_credit, rotation, tell
from campaigns.oracle.random.totals import operands
from overweave.ir.schedule import Compute, Copy, Notify, Schedule, Wait


def stored_at_peers(rng: Random, ranks: int, pieces: int) -> Schedule:
    """Products go to their owners, where one signal counts all of a piece; what adds them stores the sum everywhere."""
    deal = Sharding.draw(rng, ranks, pieces)
    draft = Draft("stored_at_peers", ranks)
    x, w, y = operands(draft, deal)
    slots = draft.buffer("slots", ranks * deal.size, deal.n, "symmetric")
    total = draft.buffer("total", deal.m, deal.n, "symmetric")
    draft.pad("arrived", pieces)
    draft.pad("shared", ranks * pieces)
    draft.queue("tiles", rng.choice(("issue", "complete")))
    draft.queue("moves", "complete", rng.choice(((), ("tiles",))))
    tiles = {(rank, to): rng.randint(1, 2) for rank in range(ranks) for to in range(ranks)}
    for rank in range(ranks):
        for owner in rotation(rng, rank, ranks):
            base = deal.shard(owner)[0] - rank * deal.size
            for piece, rows in enumerate(deal.pieces(owner)):
                if rows[0] < rows[1]:
                    parts = x(rank, rows), w(rank), slots(owner, rows, base)
                    draft.multiply((rank, "tiles"), parts, (), tell("arrived", owner, piece), tiles[rank, owner])
    for rank in range(ranks):
        lo = deal.shard(rank)[0]
        for piece, rows in enumerate(deal.pieces(rank)):
            if rows[0] == rows[1]:
                continue
            peers = [source for source in range(ranks) if source != rank]
            count = sum(tiles[source, rank] for source in peers)
            draft.add(
                Compute,
                "add",
                (rank, "tiles"),
                (),
                tuple(Notify("shared", one, rank * pieces + piece) for one in range(ranks)),
                a=(x(rank, rows),),
                b=w(rank),
                out=(total(rank, rows),),
                addends=tuple(slots(rank, rows, lo - source * deal.size) for source in peers),
                place=rank,
                late_waits=(Wait("arrived", (piece, piece + 1), count),) if count else (),
                copies=tuple(total(peer, rows) for peer in peers),
                tiles=tiles[rank, rank],
            )
    for rank in range(ranks):
        for owner in [rank, *rotation(rng, rank, ranks)]:
            for piece, rows in enumerate(deal.pieces(owner)):
                if rows[0] < rows[1]:
                    signal = owner * pieces + piece
                    waits = (Wait("shared", (signal, signal + 1), tiles[owner, owner]),)
                    draft.move(Copy, (rank, "moves"), (total(rank, rows), y(rank, rows)), waits)
    return draft.schedule(every_credit(ranks))
