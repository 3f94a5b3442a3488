"""Where do groups of waves pay? Speed-ups over sizes on a described machine, and what share of the bound they reach.

    python -m campaigns.overlap_map --machine rtx4090x4 [--world 2] [--points 5] [--out build/waves]

Sizes lie evenly in the paper's ranges for such a machine (Table 3): elements of the product by the reduced extent. Of
each the best partition that Algorithm 1 names is held against the library's matmul and its collective in a row, and
against the bound: the longer of matmul and collective, with the first wave or the collective of the last one beside it
(FlashOverlap 6.4). With --out: a CSV, and the picture of Figure 13. PASS, on machines whose links are slow:
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
from campaigns.waves.simulated import (
    KIBI,
    MEBI,
    SLOW,
    SUMS,
    Search,
    Sized,
    figure_of,
    named_us,
    save,
    spread,
    write_rows,
)
from overweave.hardware.machine import Machine, load
from overweave.tuner.space.waves import WaveCosts

OF_BOUND = 0.8
SHOWN = {"speedup": "times as quick as sequential", "of_bound": "share of the bound"}
Row = dict[str, object]


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


def draw(path: Path, machine: Machine, world_size: int, rows: list[Row]) -> None:
    """For each operator the two maps of Figure 13."""
    figure, axes = figure_of(2, len(SUMS), 12, 4.2 * len(SUMS))
    for line, operator in zip(axes, SUMS, strict=True):
        own = [one for one in rows if one["operator"] == operator]
        across = sorted({int(str(one["mn_mebi"])) for one in own})
        down = sorted({int(str(one["k_kibi"])) for one in own})
        for place, (name, title) in zip(line, SHOWN.items(), strict=True):
            known = {(one["k_kibi"], one["mn_mebi"]): float(str(one[name])) for one in own}
            image = place.imshow([[known[k, mn] for mn in across] for k in down], origin="lower", aspect="auto")
            middle = mean(image.get_clim())
            for (k, mn), value in known.items():
                ink = "white" if value < middle else "black"
                where = across.index(int(str(mn))), down.index(int(str(k)))
                place.text(*where, f"{value:.2f}", ha="center", va="center", color=ink)
            place.set(xticks=range(len(across)), yticks=range(len(down)))
            place.set(xlabel="m n of the product (1024 x 1024 elements)", ylabel="k of one rank (1024 elements)")
            place.set(xticklabels=across, yticklabels=down, title=f"{operator}: {title}")
            figure.colorbar(image, ax=place)
    figure.suptitle(f"{machine.name}, {world_size} ranks, simulated: after FlashOverlap's Figure 13")
    save(figure, path)


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
        one for operator in SUMS for one in spread(machine, operator, asked.world, asked.points, asked.largest * MEBI)
    ]
    rows = [row(one) for one in shown(every, "sizes", len(every))]
    if asked.out:
        name = f"overlap_map.{machine.name}.w{asked.world}"
        write_rows(asked.out / f"{name}.csv", rows)
        draw(asked.out / f"{name}.png", machine, asked.world, rows)
    return tell(verdicts(machine, rows))


if __name__ == "__main__":
    sys.exit(main())
