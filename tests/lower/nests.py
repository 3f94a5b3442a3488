"""Loop nests as Mercury and others write them, by name: the mesh, and the words."""

from __future__ import annotations

from overweave.lower.nest import NestWord, buffer, loop, parallelize, shard, shift

Written = tuple[tuple[int, ...], tuple[NestWord, ...]]


def matmuls(one: int, other: int = 2) -> dict[str, Written]:
    """Nests of a matmul on so many ranks, or on `[one, other]`."""
    return _on_a_line(one) | _on_a_grid(one, other)


def _on_a_line(one: int) -> dict[str, Written]:
    rows = (parallelize("m", 0), shard("x", m=0), shard("y", m=0))
    cols = (parallelize("n", 0), shard("x", m=0), shard("w", n=0), shard("y", n=0))
    sums = (parallelize("k", 0), shard("x", k=0), shard("w", k=0))
    nests = {
        "gather": (*cols, buffer("x")),
        "ring": (*cols, loop("m", one), shift("m", 0), buffer("x")),
        "ring_back": (*cols, loop("m", one), shift("m", 0, -1), buffer("x")),
        "pulled": (*cols, loop("m", one), shift("m", 0)),
        "weight_ring": (*rows, shard("w", k=0), loop("k", one), shift("k", 0), buffer("w")),
        "weight_pulled": (*rows, shard("w", n=0), loop("n", one)),
        "reduced": (*sums, shard("y", m=0)),
        "summed": sums,
    }
    return {name: ((one,), words) for name, words in nests.items()}


def _on_a_grid(one: int, other: int) -> dict[str, Written]:
    both, square = (one, other), (other, other)
    grid = (parallelize("m", 0), parallelize("n", 1), shard("y", m=0, n=1), shard("x", m=0, k=1), shard("w", k=0, n=1))
    homes = (shard("x", m=(0, 1)), shard("w", n=(0, 1)), shard("y", n=(0, 1)))
    cols = (parallelize("n", 0), parallelize("n", 1), *homes)
    return {
        "cannon": (square, (*grid, loop("k", other), shift("k", (0, 1)), buffer("x"), buffer("w"))),
        "two_level_gather": (both, (*cols, buffer("x"))),
        "double_ring": (both, (*cols, loop("m", one), shift("m", 0), loop("m", other), shift("m", 1), buffer("x"))),
        "summa": (both, (*grid, loop("k", other))),
    }


def attentions(one: int, other: int = 2) -> dict[str, Written]:
    """Nests of attention."""
    own = (shard("q", q=0), shard("k", kv=0), shard("v", kv=0), shard("o", q=0))
    both = (shard("q", q=(0, 1)), shard("k", kv=(0, 1)), shard("v", kv=(0, 1)), shard("o", q=(0, 1)))
    kept = (buffer("k"), buffer("v"))
    queries = (parallelize("q", 0), parallelize("q", 1))
    return {
        "ring_attention": ((one,), (parallelize("q", 0), *own, loop("kv", one), shift("kv", 0), *kept)),
        "gathered_keys": ((one,), (parallelize("q", 0), *own, *kept)),
        "double_ring_attention": (
            (one, other),
            (*queries, *both, loop("kv", one), shift("kv", 0), loop("kv", other), shift("kv", 1), *kept),
        ),
        "heads": ((one,), (parallelize("h", 0), *(shard(name, h=0) for name in "qkvo"), loop("kv", 2))),
    }
