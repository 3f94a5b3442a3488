"""Does the simulator predict what was measured? Result files of `overweave bench` beside simulated calls.

    python -m campaigns.sim_accuracy [FILE ...] [--machine h200x4]        (default: benchmarks/results/mlp.*.json)
    python -m campaigns.sim_accuracy --all                          (every result file: campaigns/choices/every_row.py)
    python -m campaigns.sim_accuracy --calibrated FILE ...          (on the GPU at hand, by its calibrated file)

Judged are NCCL + cuBLAS (`sequential`), one library matmul per shard (`per_shard`) and ours, as its plan was then.
Exposed communication is what a call takes beyond the matmul alone, on both sides (Flux, 5.1); its error is the mean
over rows of |predicted / measured - 1|. It is told twice: over all rows, and over those whose measured value exceeds
its own noise, since a row that measured 0 +- 2 us has no relative error to speak of. And once more in microseconds,
all together.

No number of the machine file may be fitted on these rows: each names its source. The `small` files are what some were
fitted on; their rows can be shown, and are no test. Launches are the host's affair and not simulated, so cases of fewer
than 1,024 rows are shown but not judged.

--calibrated judges one number, the mean error of whole calls on a machine that `overweave calibrate -w 2` has measured,
of files that were benched there: `overweave bench all_gather_matmul --shapes mlp -w 2 --json FILE`, and so on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import torch
from msgspec import Struct

from campaigns.choices.every_row import every_verdict
from campaigns.choices.measured_rows import Measured, read
from campaigns.verdict import Verdict, tell
from overweave.errors import InputError
from overweave.hardware.cards import MOST_GPUS, machine_for
from overweave.hardware.machine import Machine, load
from overweave.memory.cuda.card import current_gpu
from overweave.schedules.catalog.catalog import build
from overweave.sim.cost import library_matmul_us
from overweave.sim.simulate import total_us
from overweave.tuner.space.target import machine_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FEWEST_ROWS = 1024
CALIBRATED_WITHIN = 0.06
TOTAL_WITHIN, EXPOSED_WITHIN, SAME_WITHIN = 0.08, 0.35, 0.05
LEAST_EXPOSED_US = 1.0  # what the timer tells apart: no error is counted relative to less


class Row(Struct, frozen=True, kw_only=True):
    """One method on one case, simulated and measured, in microseconds. where: operator, world size and case.

    noise_us: of what was measured as exposed.
    """

    where: tuple[str, str]
    method: str
    is_judged: bool
    predicted_us: float
    measured_us: float
    predicted_matmul_us: float
    measured_matmul_us: float
    noise_us: float

    @property
    def error(self) -> float:
        """Of the whole call's time, relative."""
        return self.predicted_us / self.measured_us - 1

    @property
    def exposed_us(self) -> tuple[float, float]:
        """Predicted and measured."""
        return self.predicted_us - self.predicted_matmul_us, self.measured_us - self.measured_matmul_us

    @property
    def exposed_error(self) -> float:
        predicted, measured = self.exposed_us
        return (predicted - measured) / max(abs(measured), LEAST_EXPOSED_US)

    @property
    def is_distinct(self) -> bool:
        """Whether what was measured as exposed exceeds its noise."""
        return abs(self.exposed_us[1]) > self.noise_us

    def __str__(self) -> str:
        run, case = self.where
        return f"{run} {case}"


def verdicts(rows: list[Row]) -> list[Verdict]:
    """The claims over the judged rows; none of them holds of no rows."""
    judged = [row for row in rows if row.is_judged]
    if not judged:
        return [Verdict("rows to judge", "none", False)]
    distinct = [row for row in judged if row.is_distinct]
    return [
        _total(judged),
        _exposed(judged, "over all rows"),
        _exposed(distinct, "where more was measured than its noise"),
        _in_sum(judged),
        _order(judged),
    ]


def _total(rows: list[Row]) -> Verdict:
    worst = max(rows, key=lambda row: abs(row.error))
    within = sum(abs(row.error) <= TOTAL_WITHIN for row in rows)
    found = f"{within} of {len(rows)} rows; worst {worst.error:+.1%}, {worst.method} of {worst}"
    return Verdict(f"total time within {TOTAL_WITHIN:.0%}", found, within == len(rows))


def _exposed(rows: list[Row], which: str) -> Verdict:
    claim = f"exposed communication within {EXPOSED_WITHIN:.0%} in the mean, {which}"
    if not rows:
        return Verdict(claim, "no such row", False)
    errors = [abs(row.exposed_error) for row in rows]
    mean, worst = sum(errors) / len(rows), rows[errors.index(max(errors))]
    predicted, measured = worst.exposed_us
    found = f"mean error {mean:.1%} of {len(rows)} rows; worst {worst.method} of {worst}"
    return Verdict(
        claim, f"{found}: {predicted:.1f} for {measured:.1f} +- {worst.noise_us:.1f} us", mean <= EXPOSED_WITHIN
    )


def _in_sum(rows: list[Row]) -> Verdict:
    missed_us = sum(abs(row.exposed_us[0] - row.exposed_us[1]) for row in rows)
    exposed_us = sum(row.exposed_us[1] for row in rows)
    share = missed_us / max(exposed_us, LEAST_EXPOSED_US)
    found = f"missed by {missed_us:.0f} of {exposed_us:.0f} us, {share:.1%}"
    return Verdict(
        f"exposed communication within {EXPOSED_WITHIN:.0%}, all rows together", found, share <= EXPOSED_WITHIN
    )


def _order(rows: list[Row]) -> Verdict:
    pairs = distinct_pairs(rows)
    wrong = [pair for pair in pairs if not _in_order(*pair)]
    swapped = "".join(f"; {one.method} and {other.method} of {one}" for one, other in wrong)
    found = f"{len(wrong)} of {len(pairs)} pairs wrong{swapped}"
    return Verdict(f"order of methods that differ by more than {SAME_WITHIN:.0%}", found, not wrong)


def distinct_pairs(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Methods of one case whose measured times differ by more than 5 % of the shorter one."""
    return [
        (one, other)
        for one, other in combinations(rows, 2)
        if one.where == other.where
        and abs(one.measured_us - other.measured_us) > SAME_WITHIN * min(one.measured_us, other.measured_us)
    ]


def _in_order(one: Row, other: Row) -> bool:
    return (one.predicted_us < other.predicted_us) == (one.measured_us < other.measured_us)


def simulated(measured: Measured, machine: Machine) -> Row:
    """A measured row beside its prediction."""
    problem = measured.problem
    return Row(
        where=(measured.run, measured.case),
        method=measured.method,
        is_judged=problem.m >= FEWEST_ROWS,
        predicted_us=total_us(build(measured.schedule, problem, measured.options), machine),
        measured_us=measured.us,
        predicted_matmul_us=library_matmul_us(machine, (problem.m, problem.n, problem.k), problem.dtype),
        measured_matmul_us=measured.matmul_us,
        noise_us=measured.noise_us,
    )


def _print(rows: list[Row]) -> None:
    columns = f"{'predicted':>10s} {'measured':>9s} {'error':>7s}"
    print(f"{'us':44s} {'total: ' + columns}   {'exposed: ' + columns} {'noise':>7s}")
    for row in rows:
        predicted, measured = row.exposed_us
        total = f"{row.predicted_us:17.1f} {row.measured_us:9.1f} {row.error:+7.1%}"
        exposed = f"{predicted:19.1f} {measured:9.1f} {row.exposed_error:+7.0%} {row.noise_us:7.1f}"
        remark = "" if row.is_distinct else "   no more than noise"
        if not row.is_judged:
            remark = "   too few rows: not judged"
        print(f"{f'{row} {row.method}':44s} {total}   {exposed}{remark}")


def calibrated_verdict(rows: Sequence[Row]) -> Verdict:
    """What a calibrated file promises."""
    errors = [abs(row.error) for row in rows if row.is_judged]
    mean = sum(errors) / len(errors) if errors else 1.0
    promise = f"mean error at most {CALIBRATED_WITHIN:.0%} by the calibrated file"
    return Verdict(promise, f"{mean:.1%} of {len(errors)}", bool(errors) and mean <= CALIBRATED_WITHIN)


def _calibrated() -> Machine:
    """The machine at hand, as it was calibrated. Raises InputError where it was not."""
    found = machine_of(current_gpu()) if torch.cuda.is_available() else None
    machine = machine_for(found, MOST_GPUS) if found and found.basis == "calibrated" else None
    if machine is None:
        here = "no GPU is at hand" if found is None else str(found)
        raise InputError("predictions by a calibrated file", here, "Run `overweave calibrate -w 2` here first")
    return machine


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--machine", default="h200x4")
    parser.add_argument("--all", action="store_true", help="judge every result file, by other bars")
    parser.add_argument("--calibrated", action="store_true", help="judge the mean error by this machine's own file")
    asked = parser.parse_args(arguments)
    if asked.all:
        return tell(every_verdict(sorted(RESULTS.glob("*.json")), load(asked.machine)))
    files = asked.files or sorted(RESULTS.glob("mlp.*.json"))
    try:
        machine = _calibrated() if asked.calibrated else load(asked.machine)
        rows = [simulated(measured, machine) for path in files for measured in read(path, machine)]
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    _print(rows)
    if asked.calibrated:
        return tell([calibrated_verdict(rows)])
    found = verdicts(rows)
    for verdict in found:
        print(f"{'pass' if verdict.holds else 'FAIL'}  {verdict.promise}: {verdict.found}")
    return int(not all(verdict.holds for verdict in found))


if __name__ == "__main__":
    sys.exit(main())
