"""What each choice in a schedule is worth: one varied, all else alike, in one interleaved comparison per layer.

    torchrun --standalone --nproc-per-node 4 -m campaigns.studies --out studies
    torchrun --standalone --nproc-per-node 2 -m campaigns.studies --device cpu --layers 64x32x48 --rounds 3
    python -m campaigns.studies --simulate h200x4

Writes STUDY.csv and, where matplotlib is installed, STUDY.png for each study of campaigns/choices/study_table.py.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec import structs

from campaigns.choices.study_simulated import simulated_points
from campaigns.choices.study_table import PUSHES, STUDIES, Layer, Point, Study
from overweave.hardware.machine import load
from overweave.memory.group import Group
from overweave.ops.operators import operator_for
from overweave.tuner.measure.baselines import CEILING, COMMUNICATION, MATMUL, SEQUENTIAL
from overweave.tuner.measure.bench import Request, joined_world, run
from overweave.tuner.measure.timer import Effort

try:
    from campaigns.choices.study_pictures import save_study

    draw: Callable[..., None] | None = save_study
except ImportError:  # matplotlib is an extra
    draw = None

LAYERS = (Layer(512, 4096, 14336), Layer(2048, 4096, 14336), Layer(8192, 4096, 14336))


def points_of(name: str, operator: str, layer: Layer, group: Group, request: Request) -> Iterator[Point]:
    """Times all variants of a study on one layer. Collective; every rank gets the same points."""
    variants = list(STUDIES[name].variants(operator, -(-layer.rows // group.world_size)))
    plans = tuple(dict.fromkeys(variant.plan for variant in variants))
    if not plans:
        return
    asked = structs.replace(request, operator=operator, cases=(layer.case(operator),), plans=plans)
    (rows,) = run(asked, group, operator_for).cases
    times = {row.name: row for row in rows.methods}
    roofs = {name: row.median_us for name, row in times.items()}
    for variant in variants:
        row = times.get(f"plan.{variant.plan}")
        measures = row.measures if row else None
        yield Point(
            study=name,
            operator=operator,
            layer=str(layer),
            world_size=group.world_size,
            device=request.device,
            series=variant.series,
            x=variant.x,
            plan=variant.plan,
            median_us=row.median_us if row else None,
            p90_us=row.p90_us if row else None,
            efficiency=measures.overlap_efficiency if measures else None,
            matmul_us=roofs[MATMUL],
            communication_us=roofs[COMMUNICATION],
            sequential_us=roofs[SEQUENTIAL],
            ceiling_us=roofs.get(CEILING),
        )


def write_table(path: Path, points: Sequence[Point]) -> None:
    """One line per point, with a head."""
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, Point.__struct_fields__)
        table.writeheader()
        table.writerows(structs.asdict(point) for point in points)


Find = Callable[[str, str, Layer], Iterable[Point]]


def study(name: str, layers: Sequence[Layer], find: Find, is_told: bool) -> list[Point]:
    """A study on every operator and layer. is_told: what it finds is printed as it comes."""
    points: list[Point] = []
    for operator in PUSHES:
        for layer in layers:
            found = list(find(name, operator, layer))
            points += found
            if is_told:
                _print(STUDIES[name], operator, layer, found)
    return points


def _print(what: Study, operator: str, layer: Layer, points: Sequence[Point]) -> None:
    if not points:
        return
    print(f"{what.title}: {operator} {layer}, matmul alone {points[0].matmul_us:.1f} us", flush=True)
    for series in dict.fromkeys(point.series for point in points):
        own = (point for point in points if point.series == series)
        told = (f"{point.x}: {'left out' if point.median_us is None else f'{point.median_us:.1f}'}" for point in own)
        print(f"  {series:<22} {', '.join(told)}", flush=True)


def _layer(text: str) -> Layer:
    rows, hidden, intermediate = map(int, text.split("x"))
    return Layer(rows, hidden, intermediate)


def save(folder: Path, name: str, points: Sequence[Point]) -> None:
    """The table and, where that can be drawn, the picture of a study."""
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder / f"{name}.csv", points)
    if draw is not None:
        draw(folder / f"{name}.png", STUDIES[name], points)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m campaigns.studies", description=__doc__.split("\n")[0])
    parser.add_argument("--studies", nargs="*", choices=tuple(STUDIES), default=tuple(STUDIES))
    parser.add_argument("--layers", nargs="*", type=_layer, default=LAYERS, help="ROWSxHIDDENxINTERMEDIATE")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--simulate", metavar="MACHINE", help="predict for a described machine in place of timing")
    parser.add_argument("--world", type=int, default=4, help="ranks to simulate")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("studies"), help="a folder, made if need be")
    asked = parser.parse_args(arguments)
    if asked.simulate:
        machine = load(asked.simulate)
        for name in asked.studies:
            find: Find = partial(simulated_points, world_size=asked.world, machine=machine)
            save(asked.out, name, study(name, asked.layers, find, is_told=True))
        return
    effort = Effort(rounds=asked.rounds, warmup=min(5, asked.rounds), host_calls=0)
    request = Request(operator="", cases=(), device=asked.device, effort=effort)
    with joined_world(asked.device) as group:
        for name in asked.studies:
            find = partial(points_of, group=group, request=request)
            points = study(name, asked.layers, find, is_told=group.rank == 0)
            if group.rank == 0:
                save(asked.out, name, points)


if __name__ == "__main__":
    main()
