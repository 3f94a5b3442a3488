"""Are all-to-alls right, whatever ranks send each other? Random counts in every plan, every result compared.

    python -m campaigns.routings --shapes 200 --worlds 2 3 4 8
    torchrun --standalone --nproc-per-node 2 -m campaigns.routings --shapes 100    (on GPUs, in bf16)

Whole numbers whose every product is exact: results are bit-equal. Blocks are uneven, many empty, down to one row on one
rank; every eighth call has equal blocks, and no counts.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.cases import EXCHANGED
from campaigns.cpu_ranks import run_on_any_ranks
from campaigns.gpu_ranks import Check, arguments
from overweave.ir.operators.registry import OPERATORS as RECORDS

EQUAL_EVERY, LARGEST = 8, 64  # calls; rows of a block
STEP = 8  # elements: kernels read rows that begin where words of 16 bytes do


class Routing(NamedTuple):
    """One call. counts: rows that each rank sends each other one; equal: all alike, and not passed."""

    operator: str
    plan: str | None
    counts: tuple[tuple[int, ...], ...]
    n: int
    k: int
    dtype: torch.dtype
    equal: bool

    def __str__(self) -> str:
        return f"{self.operator}.{self.plan} {self.counts} n={self.n} k={self.k} {self.dtype}"

    def given(self) -> dict[str, Any]:
        """What a call takes beside its tensors."""
        beside = {} if self.equal else {"counts": self.counts, "most": LARGEST}
        return {"plan": self.plan, **beside}


def routings(count: int, seed: int, ranks: int, dtypes: tuple[torch.dtype, ...]) -> Iterator[Routing]:
    """The same on every rank."""
    chance = random.Random(seed)
    for index in range(count):
        equal, one = index % EQUAL_EVERY == 0, chance.choice(EXCHANGED)
        plan = chance.choice((one.plan, None)) if equal or not one.method.is_fused else None
        rows = chance.choice((chance.randint(1, LARGEST), 128, 256)) if equal else chance.randint(1, LARGEST)
        sizes = (rows,) if equal else chance.choice(((0, 1), (0, 0, 0, rows), range(LARGEST + 1), (0, LARGEST)))
        counts = tuple(tuple(chance.choice(sizes) for _ in range(ranks)) for _ in range(ranks))
        n, k = (STEP * chance.randint(1, 12) for _ in range(2))
        yield Routing(one.operator, plan, counts, n, k, chance.choice(dtypes), equal)


def outcome(case: Routing, device: str) -> str:
    """What is wrong with a call on this rank; empty if nothing is. Every rank draws what all ranks have."""
    rank, ranks, chance = dist.get_rank(), range(dist.get_world_size()), torch.Generator().manual_seed(len(str(case)))

    def drawn(rows: int, cols: int) -> torch.Tensor:
        return torch.randint(-2, 3, (rows, cols), generator=chance).to(case.dtype)

    blocks = [[drawn(case.counts[source][target], case.k) for target in ranks] for source in ranks]
    weights = [drawn(case.k, case.n) for _ in ranks]
    x, w = torch.cat(blocks[rank]).to(device), weights[rank].to(device)
    gathers = RECORDS[case.operator].gathers
    received = [blocks[source][rank].float() @ weights[rank if gathers else source].float() for source in ranks]
    given = case.given()
    if not gathers:  # x in another order, and where its rows go
        order = torch.randperm(len(x), generator=chance)
        x, given["tokens"] = x[order.to(device)], order.argsort()
    y = getattr(ow, case.operator)(x, w, **given)
    return "" if torch.equal(y, torch.cat(received).to(case.dtype).to(device)) else f"{case} is not bit-equal"


def tried(count: int, seed: int) -> list[str]:
    """One rank's part, on the CPU."""
    cases = routings(count, seed, dist.get_world_size(), (torch.float32,))
    return [wrong for case in cases if (wrong := outcome(case, "cpu"))]


def checks(asked: argparse.Namespace, device: str) -> Iterable[Check]:
    """Two seeds."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for seed in (asked.seed, asked.seed + 1):
        cases = routings(asked.shapes, seed, dist.get_world_size(), (dtype,))
        yield Check(f"random counts, seed {seed}", partial(map, partial(outcome, device=device), cases))


def main() -> int:
    parser = arguments(str(__doc__), deadline_s=60.0)
    parser.add_argument("--shapes", type=int, default=200, help="random calls, in each world")
    return run_on_any_ranks(parser, checks)


if __name__ == "__main__":
    sys.exit(main())
