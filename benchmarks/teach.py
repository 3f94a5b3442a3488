"""Teaches a table of the tuner what benchmark runs found: every plan they timed beside the library becomes a candidate.

    python -m benchmarks.teach overweave/tuner/tables/h200x4.json RESULTS.json ...

For runs of `overweave bench --json`, with or without `--plan`, where tuning anew would cost GPU time. They take the
place of what the table knew about their cases. Of a plan that several of them timed the last one stands; where ours was
what a baseline is, ours stands, as the operator runs it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from overweave.ir.problem import Problem
from overweave.schedules.methods.registry import METHODS
from overweave.schedules.records.outside import OUTSIDE
from overweave.tuner.caches import encode, replace_whole
from overweave.tuner.measure.baselines import NAMED, SEQUENTIAL, row_name
from overweave.tuner.space.shapes import ShapeCase
from overweave.tuner.space.space import Candidate, candidate, candidates, is_member
from overweave.tuner.store import cache
from overweave.tuner.store.cache import Entry, Time, bucket_problem

PLANS = {row_name(plan): plan for plan in (SEQUENTIAL, "per_shard", *OUTSIDE)}
DEFAULTS = {"pieces": 1}  # of plans with a tile kernel, on a GPU (tuner/space/target.py)


def entries(data: bytes) -> Iterator[Entry]:
    """What the middle run of a result file says of each of its cases."""
    report = msgspec.json.decode(data)
    run = report["runs"][report["middle"]]
    size, operator = run["world_size"], run["operator"]
    for row in run["cases"]:
        problem = msgspec.convert(row["case"], ShapeCase).problem(operator, size, run["dtype"])
        times = {time.candidate: time for time in _times(operator, row["methods"])}
        if times:
            yield Entry(bucket_problem(problem), tuple(sorted(times.values(), key=lambda time: time.us)))


def together(found: Iterable[Entry]) -> tuple[Entry, ...]:
    """One entry for each problem, with the last time of each candidate."""
    times: dict[Problem, dict[Candidate, Time]] = {}
    for entry in found:
        times.setdefault(entry.problem, {}).update({time.candidate: time for time in entry.times})
    return tuple(
        Entry(problem, tuple(sorted(of_each.values(), key=lambda time: time.us))) for problem, of_each in times.items()
    )


def unfinished(data: bytes) -> str:
    """What is to be said of a file whose bench did not come to its end. The cases that it holds are whole."""
    so_far = msgspec.json.decode(data).get("unfinished")
    return f" (unfinished: {so_far})" if so_far else ""


def _times(operator: str, methods: list[dict[str, object]]) -> Iterator[Time]:
    for method in methods:
        name = str(method["name"])
        text = str(method.get("plan") or PLANS.get(name, name.removeprefix(NAMED) if name.startswith(NAMED) else ""))
        known = _known(operator, text) if text else None
        if known is not None:
            yield Time(known.plan, dict(known.options), float(str(method["median_us"])))


def _known(operator: str, text: str) -> Candidate | None:
    """The candidate of the tuner that runs as `plan=text` does on a GPU: options not asked for have their defaults."""
    plan, *pairs = text.split()
    asked = {key: int(value) if value.isdigit() else value for key, value in (pair.split("=") for pair in pairs)}
    if is_member(operator, candidate(plan, asked)):
        return candidate(plan, asked)
    method = METHODS.get(f"{operator}.{plan}")
    if method is None:  # one of torch's, or a plan that is no more
        return None
    defaults = {option.name: option.default for option in method.options}
    runs_as = {**defaults, **DEFAULTS, **asked}
    same = (each for each in candidates(operator) if each.plan == plan and set(asked) <= dict(each.options).keys())
    return next((each for each in same if all(runs_as[name] == value for name, value in each.options)), None)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, metavar="TABLE")
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS")
    asked = parser.parse_args(arguments)
    path: Path = asked.table
    table = cache.decode(path.read_bytes())
    learned: list[Entry] = []
    for result in asked.results:
        data = result.read_bytes()
        found = tuple(entries(data))
        learned += found
        winners = ", ".join(str(entry.times[0].candidate) for entry in found)
        print(f"{result.name}{unfinished(data)}: {len(found)} problems, winners {winners}")
    replace_whole(path, encode(table.with_entries(together(learned))))


if __name__ == "__main__":
    main(sys.argv[1:])
