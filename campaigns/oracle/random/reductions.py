"""Random right reductions as lists of moves and sums, in which every chunk goes its own way."""

from __future__ import annotations

from random import Random

from overweave.ir.shards import piece_rows, shard_rows
from overweave.schedules.moves.moves import Chunk, Get, Put, Reduction, ReductionStep, Sum


def by_hand(rng: Random, shape: tuple[int, int, int, int], everywhere: bool = False) -> Reduction:
    """Every chunk is added up along a tree of its own, and shared along another. shape: rows, cols, ranks, pieces."""
    rows, cols, ranks, pieces = shape
    ways: list[list[ReductionStep]] = []
    for owner in range(ranks):
        for part in piece_rows(shard_rows(rows, ranks, owner), pieces):
            if part[0] < part[1]:
                ways.append(_added(rng, owner, ranks, Chunk(part), cols))
                if everywhere and ranks > 1:
                    ways[-1] += _shared(rng, owner, ranks, Chunk(part))
    moves: list[ReductionStep] = []
    while ways:  # some order that leaves each chunk's own as it is
        way = rng.choice(ways)
        if way:
            moves.append(way.pop(0))
        ways = [one for one in ways if one]
    return Reduction(ranks, tuple(moves), everywhere)


def _added(rng: Random, owner: int, ranks: int, chunk: Chunk, cols: int) -> list[ReductionStep]:
    """Leaves send first; whoever has received adds before it sends. The owner adds last, or leaves that to the end."""
    waiting = [rank for rank in rng.sample(range(ranks), ranks) if rank != owner]
    received, moves = set[int](), list[ReductionStep]()
    while waiting:
        rank = waiting.pop(0)
        peer = rng.choice([*waiting, owner])
        if rank in received:
            moves.append(Sum(rank, chunk))
        for part in piece_rows((0, cols), rng.choice((1, 1, 2)), 8):
            cut = chunk if part == (0, cols) else Chunk(chunk.rows, part)
            moves.append(_carry(rng, rank, peer, cut))
        received.add(peer)
    return moves


def _shared(rng: Random, owner: int, ranks: int, chunk: Chunk) -> list[ReductionStep]:
    holders, found = [owner], list[ReductionStep]([Sum(owner, chunk)])
    for rank in rng.sample(range(ranks), ranks):
        if rank != owner:
            found.append(_carry(rng, rng.choice(holders), rank, chunk))
            holders.append(rank)
    return found


def _carry(rng: Random, source: int, target: int, chunk: Chunk) -> Put | Get:
    lane = rng.randint(0, 2)
    return Put(source, target, chunk, lane) if rng.random() < 0.5 else Get(target, source, chunk, lane)
