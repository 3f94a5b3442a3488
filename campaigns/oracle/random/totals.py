"""Random right schedules after which every rank has the whole sum: by the library, by reading, by storing at peers."""

from __future__ import annotations

from random import Random

from campaigns.oracle.random.drafts import Draft, Place, Sharding, cut, every_credit, one, rotation, tell
from overweave.ir.schedule import Collective, Compute, Copy, Notify, Reduce, Schedule, Wait
from overweave.ir.tensors import product


def all_reduces(rng: Random, ranks: int, pieces: int) -> Schedule:
    """A product and a library all-reduce of each piece, in place or from elsewhere."""
    deal = Sharding.draw(rng, ranks, pieces)
    draft = Draft("all_reduces", ranks)
    x, w, y = operands(draft, deal)
    partial = y if rng.random() < 0.5 else draft.buffer("partial", deal.m, deal.n, "local")
    draft.queue("main")
    draft.queue("library", "complete", rng.choice(((), ("main",))))
    draft.pad("computed", pieces)
    for rank in range(ranks):
        for piece, rows in enumerate(cut((0, deal.m), pieces)):
            parts = x(rank, rows), w(rank), partial(rank, rows)
            draft.multiply((rank, "main"), parts, (), tell("computed", rank, piece))
            draft.add(
                Collective,
                "all_reduce",
                (rank, "library"),
                one("computed", piece),
                function="all_reduce",
                label=f"piece.{piece}",
                ranks=tuple(range(ranks)),
                sources=(partial(rank, rows),),
                destinations=(y(rank, rows),),
            )
    return draft.schedule(())


def read_everywhere(rng: Random, ranks: int, pieces: int) -> Schedule:
    """Every rank adds all ranks' products where they lie, in tiles that announce their part of the total."""
    deal = Sharding.draw(rng, ranks, pieces)
    draft = Draft("read_everywhere", ranks)
    x, w, y = operands(draft, deal)
    partial = draft.buffer("partial", deal.m, deal.n, "symmetric")
    total = draft.buffer("total", deal.m, deal.n, "local")
    draft.pad("ready", pieces)
    draft.pad("summed", pieces)
    draft.queue("main")
    draft.queue("sums", "issue")
    draft.queue("moves")
    for rank in range(ranks):
        for piece, rows in enumerate(cut((0, deal.m), pieces)):
            told = tuple(Notify("ready", peer, piece) for peer in [rank, *rotation(rng, rank, ranks)])
            draft.multiply((rank, "main"), (x(rank, rows), w(rank), partial(rank, rows)), (), told)
    for rank in range(ranks):
        for piece, rows in enumerate(cut((0, deal.m), pieces)):
            tiles = rng.randint(1, 3)
            draft.add(
                Reduce,
                "sum",
                (rank, "sums"),
                one("ready", piece, ranks),
                tell("summed", rank, piece),
                operands=tuple(partial(source, rows) for source in range(ranks)),
                out=total(rank, rows),
                tiles=tiles,
            )
            moved = total(rank, rows), y(rank, rows)
            draft.move(Copy, (rank, "moves"), moved, one("summed", piece, tiles))
    return draft.schedule(every_credit(ranks))


def operands(draft: Draft, deal: Sharding) -> tuple[Place, Place, Place]:
    """Every rank's part of the reduced axis, and the whole sum as everybody's goal."""
    x, w = draft.buffer("x", deal.m, deal.k, "input"), draft.buffer("w", deal.k, deal.n, "input")
    y = draft.buffer("y", deal.m, deal.n, "output")
    for rank in range(deal.ranks):
        draft.give_split(rank, deal, x(rank), w(rank))
        draft.want(y(rank), product("a", "b"), 0, 0, deal.terms(list(range(deal.ranks))))
    return x, w, y


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
