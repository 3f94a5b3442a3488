"""Random right schedules whose sums have no order: the owner clears, all add as they like, the owner reads last."""

from __future__ import annotations

from random import Random

from campaigns.oracle.random.drafts import Draft, Sharding, every_credit, one, rotation, tell
from overweave.ir.schedule import Reduce, ReducePut, Schedule


def add_in_any_order(rng: Random, ranks: int, pieces: int) -> Schedule:
    """Every piece of a peer's shard is multiplied and added at its owner, who adds its own part in the end."""
    deal = Sharding.draw(rng, ranks, pieces)
    draft = Draft("add_in_any_order", ranks)
    x, w = draft.buffer("x", deal.m, deal.k, "input"), draft.buffer("w", deal.k, deal.n, "input")
    partial = draft.buffer("partial", deal.m, deal.n, "local")
    total = draft.buffer("total", deal.size, deal.n, "symmetric")
    y = draft.buffer("y", deal.size, deal.n, "output")
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
