"""Which schedule is fastest on four H200s? Every one of the catalog, simulated for the two halves of an MLP.

python examples/03_simulate.py
"""

from __future__ import annotations

from overweave.errors import InputError
from overweave.hardware.machine import load
from overweave.ir.problem import Problem
from overweave.ir.timeline.timeline import COMMUNICATION, Timeline
from overweave.schedules.catalog.catalog import build, names
from overweave.sim.simulate import simulate

# 8,192 tokens, hidden size 4,096, inner size 14,336, tensor parallel 4: sizes of one rank's matmul.
HALVES = {
    "all_gather_matmul": {"m": 8192, "n": 14336 // 4, "k": 4096},
    "matmul_reduce_scatter": {"m": 8192, "n": 4096, "k": 14336 // 4},
}
OURS = {"kernel": "hopper"}  # what fused schedules take beside their defaults


def compare(operator: str) -> dict[str, Timeline]:
    """The simulated call of each schedule, the fastest first."""
    machine = load("h200x4")
    problem = Problem(operator=operator, world_size=machine.gpus, dtype="bfloat16", **HALVES[operator])
    timelines = {}
    for name in names(operator):
        try:
            plan = build(name, problem, OURS)
        except InputError:  # computed by library matmuls: there is no kernel to choose
            plan = build(name, problem, {})
        timelines[name] = simulate(plan, machine)
    return dict(sorted(timelines.items(), key=lambda item: item[1].total_us))


def main() -> None:
    for operator in HALVES:
        timelines = compare(operator)
        slowest_us = max(timeline.total_us for timeline in timelines.values())
        print(f"{operator}, microseconds on 4 x H200")
        width = max(map(len, timelines)) - len(operator)
        for name, timeline in timelines.items():
            bar = "#" * round(40 * timeline.total_us / slowest_us)
            moves = any(span.kind in COMMUNICATION for span in timeline.spans)  # or tiles store at peers
            hidden = f"{timeline.overlap_ratio():4.0%} hidden" if moves else ""
            print(f"  {name.split('.')[1]:{width}s} {timeline.total_us:7.1f}  {hidden:11s}  {bar}")
        print()


if __name__ == "__main__":
    main()
