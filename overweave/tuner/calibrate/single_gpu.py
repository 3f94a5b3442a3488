"""Matmuls of a tile kernel on one GPU: made, checked and timed for campaigns and calibration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from overweave.compat.torch_names import sleep
from overweave.ir.plan import MatmulConfig
from overweave.ir.problem import Problem
from overweave.ir.tile_order import TileRow
from overweave.runtime.gpu.matmul import Matmul
from overweave.schedules.catalog.catalog import build

SAMPLES = 9
SHAPE_OPTIONS = ("block_m", "block_n", "block_k", "group_m", "stages", "warps", "split_n", "kernel")


@runtime_checkable
class Rewound(Protocol):
    """A kernel whose tiles can be claimed again."""

    def __call__(self) -> object: ...
    def reset_claims(self) -> None: ...
    def run(self) -> None: ...


def operands(m: int, n: int, k: int, is_transposed: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers from -1 to 1, whose sums are exact in any order."""
    a = torch.randint(-1, 2, (m, k), device="cuda", dtype=torch.int8).bfloat16()
    if is_transposed:
        return a, torch.randint(-1, 2, (n, k), device="cuda", dtype=torch.int8).bfloat16().t()
    return a, torch.randint(-1, 2, (k, n), device="cuda", dtype=torch.int8).bfloat16()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of such operands, rounded once."""
    return (a.float() @ b.float()).to(a.dtype)


def rows_of(m: int, n: int, k: int, config: MatmulConfig) -> tuple[TileRow, ...]:
    """Return the tile table of an ordinary matmul: all_gather_matmul in a group of one."""
    problem = Problem(operator="all_gather_matmul", m=m, n=n, k=k, world_size=1, dtype="bfloat16")
    options: dict[str, int | str] = {name: getattr(config, name) for name in SHAPE_OPTIONS}
    options["sms"] = torch.cuda.get_device_properties(0).multi_processor_count
    return build("all_gather_matmul.push", problem, options).tile_orders[0].rows


def checked_matmul(config: MatmulConfig, a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor) -> Matmul:
    """Return the matmul in a tile shape, run once and compared. Raises AssertionError for a wrong result."""
    (m, k), n = a.shape, b.shape[1]
    out = torch.full((m, n), float("nan"), device="cuda", dtype=a.dtype)
    matmul = Matmul(config, rows_of(m, n, k, config), a, b, out)
    matmul()
    assert torch.equal(out, exact), f"{m}x{n}x{k} {config}: wrong"
    return matmul


def medians_us(calls: list[Callable[[], object]], samples: int = SAMPLES) -> list[float]:
    """Return the median device time of each call. The calls alternate, each behind a sleep that hides the host. A table
    of tiles is rewound before its time begins; in a plan the call's prologue does that."""
    times: list[list[float]] = [[] for _ in calls]
    for sample in range(-2, samples):
        for offset in range(len(calls)):
            index = (offset + sample) % len(calls)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call = calls[index]
            sleep(200_000)
            run = call
            if isinstance(call, Rewound):
                call.reset_claims()
                run = call.run
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            if sample >= 0:
                times[index].append(float(begin.elapsed_time(end)) * 1e3)
    return [sorted(each)[samples // 2] for each in times]
