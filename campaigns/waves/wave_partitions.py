"""Does Algorithm 1 find good groups of waves? Its times and its choices against the simulator's.

    python -m campaigns.wave_partitions --machine h200x4 [--combinations 250] [--sizes 30] [--out build/waves]

Errors (FlashOverlap's Figure 15): of random sizes in the paper's ranges with random partitions, its time against the
simulated one, which shares no timing code with it. Choices (Figure 14): of sizes with at most ten waves the best of
the three partitions that it names, by simulation, against the best of all partitions; beside it equal groups, and the
best where waves are taken for 20 tiles wider than they are.
PASS: in the mean 99 % of the best, and 97 % of it for each size. With --out: CSVs, and the two figures.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean, median

from campaigns.shown import shown
from campaigns.verdict import Verdict, tell
from campaigns.waves.simulated import MEBI, Search, Sized, drawn, figure_of, named_us, save, write_rows
from overweave.hardware.machine import load
from overweave.tuner.space.waves import Partition, best_partitions, format_partition, predicted_us

RANKS, EQUAL = (2, 4), (1, 2, 4)  # ranks of a group; waves of each group of an equal partition
MOST_WAVES, LARGEST = 10, 32 * MEBI  # of exhaustive searches; elements of the product in the others
MEAN, EACH = 0.99, 0.97
TOO_WIDE = 20  # tiles by which the paper's misconfigured waves are too wide (6.5)
# What is held against the best partition: columns of the choices, and their names in the picture.
WAYS = {
    "reached": "best of\nthree named",
    "first": "Algorithm 1's\nfirst",
    **{f"equal_{size}": f"equal\ngroups of {size}" for size in EQUAL},
    "too_wide": f"waves {TOO_WIDE}\ntiles too wide",
}
Row = dict[str, object]


def every_partition(waves: int) -> Iterator[Partition]:
    """All of them, those beyond the bounds of the search, too."""
    for cuts in product((False, True), repeat=waves - 1):
        groups = [1]
        for is_cut in cuts:
            if is_cut:
                groups.append(1)
            else:
                groups[-1] += 1
        yield tuple(groups)


def random_partition(waves: int, chance: random.Random) -> Partition:
    ends = sorted(chance.sample(range(1, waves), chance.randint(0, min(waves - 1, 6))))
    return tuple(hi - lo for lo, hi in zip((0, *ends), (*ends, waves), strict=True))


def equal_groups(waves: int, size: int) -> Partition:
    """Groups of `size` waves, the last one what is left."""
    return tuple(min(size, waves - first) for first in range(0, waves, size))


def error_row(sized: Sized, chance: random.Random) -> Row:
    """One combination of a size, a partition and ranks."""
    search = Search(sized)
    partition = random_partition(search.costs.waves, chance)
    told_us, simulated_us = predicted_us(partition, search.costs), search.us(partition)
    return {
        "size": str(sized),
        "groups": format_partition(partition),
        "algorithm_1_us": round(told_us, 1),
        "simulated_us": round(simulated_us, 1),
        "error": round(abs(told_us - simulated_us) / simulated_us, 4),
    }


def choice_row(sized: Sized) -> Row:
    """One size: what each way to group reaches of the best of all partitions."""
    search = Search(sized)
    waves = search.costs.waves
    named = [partition for _, partition in best_partitions(search.costs)]
    taken, best = search.best(named), search.best(every_partition(waves))
    least_us = search.us(best)
    row: Row = {"size": str(sized), "waves": waves, "taken": format_partition(taken), "best": format_partition(best)}
    row |= {"best_us": round(least_us, 1), "sequential": round(least_us / sized.sequential_us(), 4)}
    row |= {"reached": round(least_us / search.us(taken), 4), "first": round(least_us / search.us(named[0]), 4)}
    for size in EQUAL:
        row[f"equal_{size}"] = round(least_us / search.us(equal_groups(waves, size)), 4)
    return row | {"too_wide": round(least_us / named_us(Search(sized._replace(too_wide=TOO_WIDE))), 4)}


def sizes_with_few_waves(machine_name: str, count: int, chance: random.Random) -> Iterator[Sized]:
    machine = load(machine_name)
    found = 0
    while found < count:
        sized = drawn(machine, chance, RANKS, LARGEST)
        if 2 <= sized.costs().waves <= MOST_WAVES:
            found += 1
            yield sized


def verdicts(errors: list[Row], choices: list[Row]) -> Iterator[Verdict]:
    off = [float(str(row["error"])) for row in errors]
    if off:
        told = f"{mean(off):.1%} in the mean, {median(off):.1%} in the median, {max(off):.1%} at most, of {len(off)}"
        yield Verdict("error of Algorithm 1 against simulation (theirs, against hardware: 3.4 %)", told, None)
    reached = [float(str(row["reached"])) for row in choices]
    if reached:
        yield Verdict("taken of the best, in the mean", f"{mean(reached):.2%} of {len(reached)}", mean(reached) >= MEAN)
        yield Verdict("taken of the best, each", f"{min(reached):.2%} at least", min(reached) >= EACH)
        for name in list(WAYS)[1:]:
            shares = [float(str(row[name])) for row in choices]
            yield Verdict(f"{name} of the best", f"{mean(shares):.2%}, {min(shares):.2%} at least", None)


def draw(folder: Path, machine: str, errors: list[Row], choices: list[Row]) -> None:
    """The two figures."""
    figure, ((left, right),) = figure_of(2, 1, 13, 4.5)
    off = sorted(100 * float(str(row["error"])) for row in errors)
    left.step(off, [(at + 1) / len(off) for at in range(len(off))], where="post", label=f"{len(off)} combinations")
    left.axvline(mean(off), color="black", linestyle="--", label=f"mean: {mean(off):.1f} %")
    left.set(
        xlabel="error of Algorithm 1 against simulation (%)", ylabel="share of combinations with at most this error"
    )
    left.set(title="after Figure 15")
    left.legend()
    right.boxplot([[float(str(row[way])) for row in choices] for way in WAYS], tick_labels=list(WAYS.values()))
    right.set(ylabel="time of the best partition / time of this one", title=f"after Figure 14, {len(choices)} sizes")
    figure.suptitle(f"{machine}, simulated: after FlashOverlap")
    save(figure, folder / f"wave_partitions.{machine}.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="h200x4")
    parser.add_argument("--combinations", type=int, default=250)
    parser.add_argument("--sizes", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    chance, machine = random.Random(asked.seed), load(asked.machine)
    problems = [drawn(machine, chance, RANKS, LARGEST) for _ in range(asked.combinations)]
    errors = [error_row(sized, chance) for sized in shown(problems, "combinations", len(problems))]
    few = sizes_with_few_waves(asked.machine, asked.sizes, chance)
    choices = [choice_row(sized) for sized in shown(few, "sizes", asked.sizes)]
    if asked.out:
        for name, rows in (("errors", errors), ("choices", choices)):
            if rows:
                write_rows(asked.out / f"wave_partitions.{name}.{asked.machine}.csv", rows)
        if errors and choices:
            draw(asked.out, asked.machine, errors, choices)
    return tell(verdicts(errors, choices))


if __name__ == "__main__":
    sys.exit(main())
