"""How long rings take where tiles store their strips at peers differently far apart
(runtime/kernel_calls/bind.py).

    torchrun --standalone --nproc-per-node 4 -m campaigns.gpu_paces

How far is a number behind the table of peers: the same calls are timed with one after the other. Prints a line for each
case: the waves of tiles in a shard, and us by the ns between strips, and by what the rule says. us: the median of the
slowest rank's samples.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.gpu_ranks import join
from overweave.memory.group import resolve
from overweave.runtime.kernel_calls.call import Peers
from overweave.tuner.measure.timer import Effort, compare, median
from overweave.tuner.space.shapes import ShapeCase

PACES_NS = (0, 550, 625, 700, 800, 1000, 1500, 2250)
EFFORT = Effort(rounds=10, warmup=2, host_calls=0)
CALLS = 4  # until one with the same tensors is a graph in each slot
TILE = 128 * 256


class Ring(NamedTuple):
    """An operator on a global matmul."""

    operator: str
    m: int
    n: int
    k: int


RINGS = (
    *(Ring("matmul_all_reduce", m, 4096, k) for m in (2048, 4096, 8192) for k in (4096, 14336)),
    *(Ring("matmul_all_reduce", m, 8192, k) for m, k in ((2048, 8192), (8192, 8192), (8192, 28672))),
    *(Ring("matmul_reduce_scatter", 8192, 4096, k) for k in (4096, 11008, 14336)),
    *(Ring("matmul_reduce_scatter", 4096, 4096, k) for k in (4096, 14336)),
    *(Ring("matmul_reduce_scatter", 8192, 8192, k) for k in (8192, 28672)),
)


@contextmanager
def noted_peers() -> Iterator[list[Peers]]:
    """The tables of peers that are made inside, as they are bound."""
    made: list[Peers] = []

    def noted(*parts: object) -> Peers:
        made.append(Peers(*parts))  # type: ignore[arg-type]
        return made[-1]

    with mock.patch("overweave.runtime.kernel_calls.bind.Peers", noted):
        yield made


def times_us(ring: Ring, device: torch.device) -> dict[str, float]:
    """By the ns between strips; `rule`: as it is bound."""
    group = resolve(None)
    problem = ShapeCase(name="", m=ring.m, n=ring.n, k=ring.k).problem(ring.operator, group.world_size, "bf16")
    x = torch.randn(ring.m, problem.k, dtype=torch.bfloat16, device=device)
    w = torch.randn(problem.k, ring.n, dtype=torch.bfloat16, device=device)
    operator = getattr(ow, ring.operator)

    def call(_: int) -> torch.Tensor:
        y: torch.Tensor = operator(x, w, plan="ring_stored")
        return y

    with noted_peers() as made:
        for turn in range(CALLS):
            call(turn)
    paces = {f"{ns} ns": ns for ns in PACES_NS} | {"rule": int(made[0].places[-1, 1])}
    found: dict[str, float] = {}
    for name, pace in paces.items():
        for peers in made:
            peers.places[-1, 1] = pace
        torch.cuda.synchronize()
        found[name] = median(compare({name: call}, device, group.process_group, EFFORT).device_us[name])
    return found


def main() -> None:
    ArgumentParser(prog="campaigns.rates.gpu_paces", description=__doc__.split("\n")[0]).parse_args()
    device = join(timedelta(seconds=60))
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    for ring in RINGS:
        found = times_us(ring, device)
        if dist.get_rank() == 0:
            waves = ring.m * ring.n / TILE / sms / dist.get_world_size()
            told = "  ".join(f"{name}: {us:.0f}" for name, us in found.items())
            print(f"{ring.operator:21s} {ring.m} x {ring.n} x {ring.k}, {waves:.2f} waves  {told}", flush=True)
    ow.check()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
