"""Where do groups of waves pay? Speed-ups over sizes on a described machine, and what share of the bound they reach.

    python -m campaigns.overlap_map --machine rtx4090x4 [--world 2] [--points 5] [--out build/waves]

Sizes lie evenly in the paper's ranges for such a machine (Table 3): elements of the product by the reduced extent. Of
each the best partition that Algorithm 1 names is held against the library's matmul and its collective in a row, and
against the bound: the longer of matmul and collective, with the first wave or the collective of the last one beside it
(FlashOverlap 6.4). With --out: a CSV, and the pictures of Figures 10 and 13. PASS, on machines whose links are slow:
0.8 of the bound in the mean. All times are simulated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from campaigns.shown import shown
from campaigns.verdict import Verdict, tell
from campaigns.waves.simulated import KIBI, MEBI, ROWS, SLOW, SUMS, Search, Sized, named_us, range_of, write_rows
from overweave.hardware.machine import Machine, load
from overweave.ir.problem import Problem
from overweave.tuner.model.partition_search import WaveCosts

COLS = 8192
OF_BOUND = 0.8
Row = dict[str, object]


def sizes(machine: Machine, operator: str, world_size: int, points: int, largest: int) -> Iterator[Sized]:
    """From the smallest to the largest of a range, both ways."""
    (low, high), (least, most) = range_of(machine, operator)
    high = max(low, min(high, largest))
    for at in range(points):
        m = round((low + (high - low) * at / max(points - 1, 1)) / COLS / ROWS) * ROWS
        for turn in range(points):
            k = round((least + (most - least) * turn / max(points - 1, 1)) / KIBI) * KIBI
            problem = Problem(operator=operator, m=m, n=COLS, k=k, world_size=world_size, dtype="bfloat16")
            yield Sized(machine, problem)


def bound_us(costs: WaveCosts) -> float:
    """No schedule of such waves is quicker."""
    computed_us = costs.waves * costs.wave_us
    return max(computed_us + costs.last_us[0], costs.wave_us + costs.last_us[-1])


def row(sized: Sized) -> Row:
    """One size."""
    search, problem = Search(sized), sized.problem
    us, plain_us = named_us(search), sized.sequential_us()
    return {
        "operator": problem.operator,
        "world": problem.world_size,
        "mn_mebi": problem.m * problem.n // MEBI,
        "k_kibi": problem.k // KIBI,
        "sequential_us": round(plain_us, 1),
        "waves_us": round(us, 1),
        "speedup": round(plain_us / us, 4),
        "of_bound": round(bound_us(search.costs) / us, 4),
    }


def verdicts(machine: Machine, rows: list[Row]) -> Iterator[Verdict]:
    for operator in SUMS:
        ups = [float(str(one["speedup"])) for one in rows if one["operator"] == operator]
        told = f"{mean(ups):.3f} in the mean, {min(ups):.3f} to {max(ups):.3f}, of {len(ups)} sizes"
        yield Verdict(f"{operator}: times as quick as the library's calls in a row", told, None)
    reached = mean(float(str(one["of_bound"])) for one in rows)
    is_slow = machine.links.push.peak_gb_per_s < SLOW
    yield Verdict("share of the bound, in the mean", f"{reached:.3f}", reached >= OF_BOUND if is_slow else None)


def draw(path: Path, machine: Machine, rows: list[Row]) -> None:
    """For each operator the two maps of Figure 13; then the bars of Figure 10."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(SUMS), 3, figsize=(14, 4 * len(SUMS)), squeeze=False)
    for line, operator in zip(axes, SUMS, strict=True):
        own = [one for one in rows if one["operator"] == operator]
        across = sorted({int(str(one["mn_mebi"])) for one in own})
        down = sorted({int(str(one["k_kibi"])) for one in own})
        for place, name in zip(line, ("speedup", "of_bound"), strict=False):
            known = {(one["k_kibi"], one["mn_mebi"]): float(str(one[name])) for one in own}
            image = place.imshow([[known[k, mn] for mn in across] for k in down], origin="lower", aspect="auto")
            place.set(xticks=range(len(across)), yticks=range(len(down)), xlabel="m n, Mi", ylabel="k, Ki")
            place.set(xticklabels=across, yticklabels=down, title=f"{operator}: {name}")
            figure.colorbar(image, ax=place)
        ups = [float(str(one["speedup"])) for one in own]
        line[2].bar([0], [mean(ups)], width=0.4)
        line[2].scatter([0, 0], [min(ups), max(ups)], color="black", zorder=2)
        line[2].set(xticks=[0], xticklabels=[machine.name], ylabel="speed-up: mean, least, most", title=operator)
    figure.suptitle(f"{machine.name}, simulated: after FlashOverlap's Figures 13 and 10")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="rtx4090x4")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--points", type=int, default=5, help="sizes each way")
    parser.add_argument("--largest", type=int, default=64, help="elements of a product, in Mi, at most")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    machine = load(asked.machine)
    every = [
        one for operator in SUMS for one in sizes(machine, operator, asked.world, asked.points, asked.largest * MEBI)
    ]
    rows = [row(one) for one in shown(every, "sizes", len(every))]
    if asked.out:
        name = f"overlap_map.{machine.name}.w{asked.world}"
        write_rows(asked.out / f"{name}.csv", rows)
        draw(asked.out / f"{name}.png", machine, rows)
    return tell(verdicts(machine, rows))


if __name__ == "__main__":
    sys.exit(main())
