"""Matmuls of odd sizes, each by who multiplies it: a tile kernel, or the library where that cannot read the rows."""

from __future__ import annotations

import torch

from campaigns.rates.operands import checked_matmul, operands, product
from overweave.ir.problem import Problem
from overweave.schedules.records.needs import ALIGNED
from overweave.schedules.records.record import MethodRequest
from overweave.schedules.tiles.shape import shapes, tile_shape
from overweave.tuner.space.target import Target

# m, n, k: nothing of each; one; primes; multiples of eight and no tile's; what once ended a campaign, n = 2,754.
SIZES = (
    (0, 64, 64), (64, 0, 64), (64, 64, 0), (1, 1, 1), (1, 8, 8), (7, 8, 64), (127, 131, 137), (257, 264, 8),
    (1021, 1032, 520), (4093, 3584, 4096), (4093, 2754, 512), (512, 2754, 4096), (300, 24, 4104),
)  # fmt: skip


def library_why(m: int, n: int, k: int) -> str:
    """Why the library multiplies these sizes; nothing if a tile kernel does."""
    if not m * n * k:
        return "there is nothing to multiply"
    problem = Problem(operator="all_gather_matmul", m=m, n=n, k=k, world_size=1, dtype="bfloat16")
    return ALIGNED.why(MethodRequest(problem, {}, Target("cuda")))


def check_size(m: int, n: int, k: int, is_transposed: bool, sms: int) -> str:
    """Multiplies integers and says by which. Raises AssertionError for a wrong result."""
    a, b = operands(m, n, k, is_transposed)
    exact = product(a, b)
    layout = f"{m} x {n} x {k}{' b^T' * is_transposed}"
    if why := library_why(m, n, k):
        assert torch.equal(torch.mm(a, b), exact), f"{layout} by the library: wrong"
        return f"{layout}: by the library: {why}"
    config = tile_shape((m,), n, sms, shapes("bfloat16", "hopper"), k)
    checked_matmul(config, a, b, exact)
    return f"{layout}: by a tile of {config.block_m} x {config.block_n}"
