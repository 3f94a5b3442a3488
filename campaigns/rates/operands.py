"""What matmuls alone on one GPU are given in campaigns: integers to be compared, and random numbers to be timed."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from overweave.ir.plan import MatmulConfig
from overweave.tuner.calibrate.rates import Matmul, rows_of

RAGGED = ((1000, 264, 136), (700, 1304, 520), (129, 2744, 72), (4096, 2696, 1032))


def operands(m: int, n: int, k: int, is_transposed: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers from -1 to 1, whose sums are exact in any order."""
    a = torch.randint(-1, 2, (m, k), device="cuda", dtype=torch.int8).bfloat16()
    if is_transposed:
        return a, torch.randint(-1, 2, (n, k), device="cuda", dtype=torch.int8).bfloat16().t()
    return a, torch.randint(-1, 2, (k, n), device="cuda", dtype=torch.int8).bfloat16()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of such operands, rounded once."""
    return (a.float() @ b.float()).to(a.dtype)


def checked_matmul(config: MatmulConfig, a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor) -> Matmul:
    """Return the matmul in a tile shape, run once and compared. Raises AssertionError for a wrong result."""
    (m, k), n = a.shape, b.shape[1]
    out = torch.full((m, n), float("nan"), device="cuda", dtype=a.dtype)
    matmul = Matmul(config, rows_of(m, n, k, config), a, b, out)
    matmul()
    assert torch.equal(out, exact), f"{m}x{n}x{k} {config}: wrong"
    return matmul


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
