"""`overweave bench experts --simulate`: predicted times of layers of experts, by each plan, without any rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from overweave.cli.predictions import Predictions, place_of, print_predictions
from overweave.moe.cases import EXPERTS, read_experts
from overweave.moe.predicted import PredictedLayer, predicted, skew_costs
from overweave.schedules.records.experts import PLANS, SEQUENTIAL

OVERLAPPED = tuple(plan for plan in PLANS if plan != SEQUENTIAL)
COLUMNS = (
    "", "matmuls\nus", "link\nus", f"{SEQUENTIAL}\nus",
    *(column for plan in OVERLAPPED for column in (f"{plan}\nus", "overlap\nefficiency")),
    "roof\nus", "its\nefficiency", "chosen",
)  # fmt: skip


def predict_layers(shapes: str, tokens: Sequence[int], asked: tuple[str, int], file: Path | None) -> None:
    """Print a line for each case. asked: a machine and the number of ranks; 0: four. Raises InputError for a machine
    without GPUs for so many ranks."""
    place = place_of(asked, file)
    machine = place.target.machine(place.ranks)
    assert machine is not None  # place_of refuses more ranks than it has GPUs
    cases = read_experts(shapes or "moe").on_ranks(place.ranks, tokens)
    layers = tuple(predicted(case, place.ranks, machine) for case in cases)
    title = f"{EXPERTS}: predicted for {place.ranks} ranks, bf16, the slowest rank's"
    predictions = Predictions(layers, title, COLUMNS, [*map(_cells, layers)], _lines(layers))
    print_predictions(place, predictions, file)


def _cells(layer: PredictedLayer) -> tuple[str, ...]:
    cells = [f"{us:.1f}" for us in (layer.alone_us, layer.link_us, layer.plans[SEQUENTIAL])]
    for plan in OVERLAPPED:
        us = layer.plans.get(plan)
        cells += [_number(us, 1), _number(None if us is None else layer.efficiency(us), 2)]
    roof = f"{layer.roof_us:.1f}{' link' if layer.is_bound_by_links else ''}"
    return layer.case.name, *cells, roof, _number(layer.efficiency(layer.roof_us), 2), layer.choice


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _lines(layers: Sequence[PredictedLayer]) -> Iterator[str]:
    yield "roof: the longer of all matmuls and of what links carry of tokens and sums; `link` where that is the second"
    for plan in PLANS:
        if costs := skew_costs(layers, plan):
            worst = max(costs.values())
            yield f"{plan}, tensor parallel: with a skewed router at most {worst:.3f} of an even one's time"
