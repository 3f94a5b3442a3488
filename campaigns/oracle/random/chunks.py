"""Random right gathers as lists of chunk moves: templates, and lists in which every rank does something else."""

from __future__ import annotations

from random import Random

from overweave.ir.plan import MatmulConfig
from overweave.ir.schedule import Buffer, Goal, InitialContents, Queue, Region, Schedule
from overweave.ir.shards import piece_rows, shard_rows
from overweave.ir.tensors import product
from overweave.schedules.catalog.compose import MatmulFootprint, compose
from overweave.schedules.communication import A, B, W, Y
from overweave.schedules.moves import island_templates
from overweave.schedules.moves.gather_templates import (
    Mesh,
    across_mesh,
    at_once,
    gather_of,
    pull,
    push,
    round_ring,
    round_two_rings,
)
from overweave.schedules.moves.moves import Chunk, Collective, Gather, GatherMove, Get, Put
from overweave.schedules.moves.transfers import transferred

TEMPLATES = (at_once, push, pull, across_mesh, round_ring, round_two_rings, island_templates.gather)
DEPTH, WIDTH = 16, 8  # columns of what is gathered, and of the product


def chunked(rng: Random, ranks: int, pieces: int) -> Schedule:
    """A gather by chunk moves, and a matmul of what has arrived. It is the library's, or a kernel's in tiles."""
    rows = max(1, ranks * pieces * rng.randint(1, 2) - rng.randint(0, 3))
    gather = by_template(rng, (rows, ranks, pieces)) if rng.random() < 0.5 else by_hand(rng, (rows, ranks, pieces))
    queue, config = Queue("main", "complete"), None
    if rng.random() < 0.5:
        queue, config = Queue("tiles", "issue", after=("main",)), MatmulConfig(block_m=16, block_n=16)
    w, y, members = Buffer(W, DEPTH, WIDTH, "input"), Buffer(Y, rows, WIDTH, "output"), range(ranks)
    kernel = MatmulFootprint(
        queue=queue,
        a=None,
        b=w,
        out=y,
        config=config,
        given=tuple(InitialContents(Region(W, rank, (0, DEPTH), (0, WIDTH)), B, 0, rank * WIDTH) for rank in members),
        goal=tuple(
            Goal(Region(Y, rank, (0, rows), (0, WIDTH)), product(A, B), 0, rank * WIDTH, ((0, DEPTH),))
            for rank in members
        ),
    )
    return compose("chunked", transferred(gather, rows, DEPTH, returns_gathered=rng.random() < 0.3), kernel)


def by_template(rng: Random, shape: tuple[int, int, int]) -> Gather:
    """shape: rows, ranks, pieces."""
    rows, ranks, pieces = shape
    mesh = Mesh(
        rows=rows,
        cols=DEPTH,
        world_size=ranks,
        pieces=pieces,
        col_pieces=rng.choice((1, 2)),
        island=rng.choice([width for width in range(1, ranks + 1) if ranks % width == 0]),
        axis=rng.choice(("inner", "outer")),
        lanes=rng.randint(1, 3),
    )
    return gather_of(rng.choice(TEMPLATES), mesh)


def by_hand(rng: Random, shape: tuple[int, int, int]) -> Gather:
    """Every chunk spreads from rank to rank by a tree of its own; some pieces are the library's."""
    rows, ranks, pieces = shape
    library = [piece for piece in range(pieces) if rng.random() < 0.2]
    moves: list[GatherMove] = [
        Collective(tuple(Chunk(_piece(rows, ranks, pieces, rank, piece)) for rank in range(ranks))) for piece in library
    ]
    trees: list[list[GatherMove]] = []
    for owner in range(ranks):
        for piece in sorted(set(range(pieces)) - set(library)):
            part = _piece(rows, ranks, pieces, owner, piece)
            for cols in piece_rows((0, DEPTH), rng.choice((1, 1, 2)), 8):
                if part[0] < part[1]:
                    trees.append(_tree(rng, owner, ranks, Chunk(part, cols)))
    while trees:  # some order that leaves each chunk's own as it is
        tree = rng.choice(trees)
        moves.append(tree.pop(0))
        trees = [one for one in trees if one]
    return Gather(ranks, tuple(moves))


def _tree(rng: Random, owner: int, ranks: int, chunk: Chunk) -> list[GatherMove]:
    holders, moves = [owner], list[GatherMove]()
    for rank in rng.sample(range(ranks), ranks):
        if rank != owner:
            source, lane = rng.choice(holders), rng.randint(0, 2)
            moves.append(Put(source, rank, chunk, lane) if rng.random() < 0.5 else Get(rank, source, chunk, lane))
            holders.append(rank)
    return moves


def _piece(rows: int, ranks: int, pieces: int, rank: int, piece: int) -> tuple[int, int]:
    return piece_rows(shard_rows(rows, ranks, rank), pieces)[piece]
