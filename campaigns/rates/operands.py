"""What matmuls alone on one GPU are given in campaigns: random numbers to be timed, and ragged sizes to be compared."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from overweave.ir.plan import MatmulConfig
from overweave.tuner.calibrate.rates import checked_matmul, operands, product

RAGGED = ((1000, 264, 136), (700, 1304, 520), (129, 2744, 72), (4096, 2696, 1032))


def make_normal(*integers: torch.Tensor) -> None:
    """Instead of integers, on which a GPU needs less power, and so is faster."""
    for one in integers:
        one.normal_()


def check_ragged(configs: Iterable[MatmulConfig]) -> None:
    """Ragged sizes, both layouts. Raises AssertionError for a wrong result."""
    known = tuple(configs)
    for shape in RAGGED:
        for is_transposed in (False, True):
            a, b = operands(*shape, is_transposed)
            exact = product(a, b)
            for config in known:
                checked_matmul(config, a, b, exact)
    print(f"{len(RAGGED)} ragged shapes, both layouts, {len(known)} tile shapes: bit-equal")
