"""The campaign of compiled tables on two emulated ranks, tiny: python tests/campaigns/interpreted_tables.py FILE

Kernels are interpreted and times mean nothing: every table must have its rows all the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from campaigns.tables.compiled_parts import (  # noqa: E402
    GATHER,
    SCATTER,
    Scope,
    Tile,
)
from campaigns.tables.compiled_tables import measure  # noqa: E402
from campaigns.tables.table_rows import write  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.tuner.measure.timer import Effort  # noqa: E402
from overweave.tuner.space.shapes import ShapeCase  # noqa: E402
from tests.compiler.untruths.trials import try_in_copies  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

try_in_copies()

RANKS = 2
CASES = {GATHER: ShapeCase(name="tiny", m=64, n=64, k=32), SCATTER: ShapeCase(name="tiny", m=64, n=32, k=64)}
TILES = (Tile("matmul", 16, 16, 16, 4, 2, 8), Tile("persistent", 16, 16, 16, 4, 2, 8))
CHUNKS = ((1, 2), (8,))
ONCE = Effort(rounds=1, warmup=0, host_calls=0)


def call(path: str) -> int:
    """This rank's part; rank 0 writes the rows."""
    group = resolve(None)
    cases = {operator: (case,) for operator, case in CASES.items()}
    shapes = ((16, 16, 16, 4, (2,)),)
    scope = Scope(group, torch.device("cpu"), cases, CASES, TILES, shapes, TILES[0], *CHUNKS, ONCE, ONCE, ONCE)
    parts = ("against", "backends", "tiles", "tuner", "streamed")
    rows = measure(parts, scope, [], 600.0, lambda rows: None)
    if group.rank == 0:
        write(Path(path), rows)
    return len(rows)


def main() -> None:
    print(f"{run_ranks(call, RANKS, sys.argv[1], timeout_s=290)} rows")


if __name__ == "__main__":
    main()
