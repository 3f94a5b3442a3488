"""The toys' device code in the kernels that take it, compiled ahead of time for sm_90a and linted. No GPU is needed.

    python -m tests.extending.lint_epilogues [TEXT]

TEXT: what kernel and configuration contain. Prints a line for each, then every finding, as `campaigns.lint_all` does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from campaigns.lint.lint_all import report
from campaigns.lint.lint_case import SUM, Case
from campaigns.lint.lint_cases import NORMED_COLS, rows_case
from campaigns.lint.lint_matmul import matmul_case
from campaigns.lint.lint_packed import packed_case
from overweave.ir.epilogue import Applied, Epilogue
from overweave.ir.plan import PACKED_SUMS, TILE_KERNEL
from overweave.ir.problem import Problem
from overweave.schedules.catalog.realized import shapes_of_tiles
from overweave.schedules.records.record import Adds
from overweave.schedules.tiles.shape import PACKED_ROWS, row_shape
from tests.extending import toy_epilogue, toy_rows

SIZES: dict[str, Any] = {"m": 4096, "n": 4096, "k": 4096, "world_size": 4, "dtype": "bfloat16"}
FP8_ROWS = Applied("fp8_rows", (448.0, 1e-12))
PARTS = Epilogue(more=(Applied("scaled_parts", (), True),))


def cases() -> Iterator[Case]:
    """Whole rows in every tile of the reduction and of packed kernels, and parts in the matmuls of both kernels."""
    toy_epilogue.add()
    toy_rows.add()
    more = (*PARTS.more, Applied("scaled_clamp", (-3.0, 5.0)))
    for operands, cols in ((4, cols) for cols in NORMED_COLS):
        yield rows_case(operands, row_shape(1 << 20, cols, 132), FP8_ROWS)
    yield rows_case(8, row_shape(1 << 20, 4096, 132), FP8_ROWS)
    for exchange in PACKED_SUMS:
        for launch in PACKED_ROWS:  # among 8 ranks the largest of a two-shot spills 12 bytes
            yield packed_case("bfloat16", 4, replace(launch, exchange=exchange), rows=FP8_ROWS)
        yield packed_case("float32", 2, replace(PACKED_ROWS[0], exchange=exchange), rows=FP8_ROWS)
    for kernel in ("portable", "hopper"):
        for epilogue, addends in ((PARTS, 0), (PARTS, 1), (Epilogue(bias=True, more=more), 1), (PARTS, 3)):
            problem = Problem(operator="matmul_reduce_scatter", **SIZES, epilogue=epilogue)
            adds = Adds(TILE_KERNEL) if addends else None
            for shape in shapes_of_tiles(problem, kernel, adds, "kernel")[:2]:  # type: ignore[arg-type]
                yield matmul_case("bfloat16", shape.config, SUM, epilogue, addends)


if __name__ == "__main__":
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    sys.exit(report(case for case in cases() if only in f"{case.source.name} {case.source.config}"))
