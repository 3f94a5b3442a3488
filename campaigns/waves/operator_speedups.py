"""How much do groups of waves gain beside other ways to overlap? Means over the paper's sizes, by operator and ranks.

    python -m campaigns.operator_speedups --machine rtx4090x4 [--points 3] [--out build/waves]

FlashOverlap's Figure 10 on a described machine: sizes lie evenly in its ranges (Table 3), and each way to overlap is
held against the library's matmul and its collective in a row: groups of waves by Algorithm 1; VanillaDecomposition, in
its better number of pieces; and, where GPUs reach each other's memory, shards or pieces that are moved by copy engines
(Async-TP) and tiles that are stored at peers (Flux). Told: means, least and most. With --out: a CSV and the picture.
All times are simulated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from campaigns.shown import shown
from campaigns.verdict import Verdict, tell
from campaigns.waves.simulated import MEBI, Search, Sized, figure_of, named_us, save, spread, write_rows
from overweave.hardware.machine import Machine, load
from overweave.ir.operators.registry import OPERATORS
from overweave.schedules.methods.registry import methods_for
from overweave.tuner.space.space import Candidate, candidate, reason_unsupported

GROUPED = tuple(name for name in OPERATORS if any(method.name == "waves" for method in methods_for(name)))
RANKS = (2, 4, 8)
WAVES = "groups of waves"
# Other ways to overlap: the plans that are tried, and their names in the picture.
OTHERS: dict[str, tuple[Candidate, ...]] = {
    "VanillaDecomposition": tuple(candidate("decomposed", {"pieces": pieces}) for pieces in (2, 4)),
    "by copy engine (Async-TP)": tuple(candidate(name, {}) for name in ("per_shard", "per_peer", "scatter")),
    "stored at peers (Flux)": tuple(candidate(name, {}) for name in ("scatter_stored", "ring_stored", "two_shot")),
}
Row = dict[str, object]


def speedups(sized: Sized) -> dict[str, float]:
    """Of each way to overlap that the operator has, over the library's calls in a row."""
    plain_us, known = sized.sequential_us(), {method.name for method in methods_for(sized.problem.operator)}
    found = {WAVES: plain_us / named_us(Search(sized))}
    for way, plans in OTHERS.items():
        own = [
            each for each in plans if each.plan in known and not reason_unsupported(sized.problem, sized.target, each)
        ]
        if own:
            found[way] = plain_us / min(map(sized.plan_us, own))
    return found


def rows_of(operator: str, world_size: int, found: list[dict[str, float]]) -> Iterator[Row]:
    """The bars of one operator and number of ranks."""
    for way in (WAVES, *OTHERS):
        ups = [each[way] for each in found if way in each]
        if ups:
            bar = {"mean": mean(ups), "least": min(ups), "most": max(ups)}
            named = {"operator": operator, "world": world_size, "way": way, "sizes": len(ups)}
            yield named | {name: round(value, 4) for name, value in bar.items()}


def study(machine: Machine, points: int, largest: int) -> list[Row]:
    """All bars of a machine."""
    rows = list[Row]()
    cases = [(operator, ranks) for operator in GROUPED for ranks in RANKS if ranks <= machine.gpus]
    for operator, ranks in shown(cases, "operators and ranks", len(cases)):
        found = [speedups(sized) for sized in spread(machine, operator, ranks, points, largest)]
        rows += rows_of(operator, ranks, found)
    return rows


def verdicts(rows: list[Row]) -> Iterator[Verdict]:
    for row in rows:
        told = f"{row['mean']:.3f} in the mean, {row['least']:.3f} to {row['most']:.3f}, of {row['sizes']} sizes"
        yield Verdict(f"{row['operator']}, {row['world']} ranks: {row['way']}, times as quick as in a row", told, None)


def draw(path: Path, machine: Machine, rows: list[Row]) -> None:
    """A panel for each operator: bars of means by ranks, the least and the most of all sizes as marks."""
    figure, (panels,) = figure_of(len(GROUPED), 1, 5 * len(GROUPED), 4.8)
    ways = [way for way in (WAVES, *OTHERS) if any(row["way"] == way for row in rows)]
    width = 0.8 / len(ways)
    for panel, operator in zip(panels, GROUPED, strict=True):
        own = [row for row in rows if row["operator"] == operator]
        ranks = sorted({int(str(row["world"])) for row in own})
        for turn, way in enumerate(ways):
            bars = [row for row in own if row["way"] == way]
            at = [ranks.index(int(str(row["world"]))) + width * (turn - (len(ways) - 1) / 2) for row in bars]
            panel.bar(at, [row["mean"] for row in bars], width * 0.9, label=way, color=f"C{turn}")
            for name, marker in (("least", "o"), ("most", "D")):
                marked = [row[name] for row in bars]
                panel.scatter(at, marked, marker=marker, facecolor="white", edgecolor="black", zorder=2)
        panel.axhline(1, color="black", linestyle="--", linewidth=1)
        panel.set(xticks=range(len(ranks)), xticklabels=ranks, xlabel="ranks", title=operator)
    panels[0].set(ylabel="times as quick as matmul and collective in a row")
    panels[0].legend(loc="upper left", fontsize="small")
    panels[0].set_ylim(top=1.35 * panels[0].get_ylim()[1])
    marks = "bar: mean; circle: least; diamond: most"
    figure.suptitle(f"{machine.name}, simulated: after FlashOverlap's Figure 10 ({marks})")
    save(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="rtx4090x4")
    parser.add_argument("--points", type=int, default=3, help="sizes each way")
    parser.add_argument("--largest", type=int, default=64, help="elements of a product, in Mi, at most")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    machine = load(asked.machine)
    rows = study(machine, asked.points, asked.largest * MEBI)
    if asked.out:
        name = f"operator_speedups.{machine.name}"
        write_rows(asked.out / f"{name}.csv", rows)
        draw(asked.out / f"{name}.png", machine, rows)
    return tell(verdicts(rows))


if __name__ == "__main__":
    sys.exit(main())
