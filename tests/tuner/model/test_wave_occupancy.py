"""The sentence about the tiles of a plan, held against tiles that are counted here."""

from __future__ import annotations

import pytest

from overweave.ir.problem import Problem
from overweave.tuner.model.choose import Choice, wave_occupancy

SMS = {"sms": 132}


def problem(operator: str, m: int, n: int, k: int = 1024) -> Problem:
    return Problem(operator=operator, m=m, n=n, k=k, world_size=2, dtype="bfloat16")


@pytest.mark.parametrize(
    ("plan", "options", "size", "found"),
    [
        # 16 x 8 whole tiles.
        ("push", {"block_m": 128, "block_n": 128}, (2048, 1024), "Tiles of 128 x 128 on 132 SMs: 0.97 waves, "
         "the last one 97% full."),
        # 16 x 20, of which the last 56 are cut in two.
        ("push", {"block_m": 128, "block_n": 256}, (2048, 5120), "Tiles of 128 x 256 on 132 SMs: 2.42 waves, "
         "the last one 42% full, some tiles in narrower parts."),
        ("sequential", {}, (2048, 1024), ""),
    ],
)  # fmt: skip
def test_waves_of_tiles(plan: str, options: dict[str, str | int], size: tuple[int, ...], found: str):
    kernel: dict[str, str | int] = {"kernel": "hopper"} if options else {}
    chosen = Choice(f"all_gather_matmul.{plan}", options | kernel | SMS if options else {}, "why")
    assert wave_occupancy(chosen, problem("all_gather_matmul", *size)) == found


def test_what_runs_elsewhere_has_no_tiles():
    asked = problem("matmul_reduce_scatter", 64, 64)
    assert wave_occupancy(Choice("torch.fused", {}, "why"), asked) == ""
    assert wave_occupancy(Choice("matmul_reduce_scatter.scatter", {}, "why"), asked) == ""
