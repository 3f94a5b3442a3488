"""`overweave bench experts --simulate`, and `attention`: predicted times by each plan, without any rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from overweave.attention.cases import ATTENTION, read_attention
from overweave.attention.predicted import predicted as attention_predicted
from overweave.cli.predictions import PredictedOn, Predictions, place_of, print_predictions
from overweave.hardware.machine import Machine
from overweave.moe.cases import EXPERTS, read_experts
from overweave.moe.predicted import PredictedLayer, predicted, skew_costs
from overweave.schedules.records.experts import PLANS
from overweave.tuner.measure.predicted_plans import Predicted

RATIO = "ratio: the part of the link's time that is hidden"
ROOF = (
    "efficiency: the part of the sequential plan's communication that is hidden; roof: the longer of all matmuls and "
    "of what links carry of tokens and sums, `link` where that is the second"
)


def predict_layers(shapes: str, tokens: Sequence[int], asked: tuple[str, int], file: Path | None) -> None:
    """Print a line for each layer of experts. asked: a machine and the number of ranks; 0: four. Raises InputError for
    a machine without GPUs for so many ranks."""
    place = place_of(asked, file)
    cases = read_experts(shapes or "moe").on_ranks(place.ranks, tokens)
    layers = [predicted(case, place.ranks, _machine(place)) for case in cases]
    more = {"roof\nus  efficiency": _roof}
    more |= {f"{plan}\nefficiency": _efficiency(plan) for plan in list(PLANS)[1:]}
    _print(EXPERTS, place, (layers, more, [RATIO, ROOF, *_skew_lines(layers)]), file)


def predict_attention(shapes: str, tokens: Sequence[int], asked: tuple[str, int], file: Path | None) -> None:
    """The same for each case of attention."""
    place = place_of(asked, file)
    cases = read_attention(shapes or ATTENTION).on_ranks(place.ranks, tokens)
    found = [attention_predicted(case, place.ranks, _machine(place)) for case in cases]
    _print(ATTENTION, place, (found, {}, [RATIO]), file)


def _machine(place: PredictedOn) -> Machine:
    machine = place.target.machine(place.ranks)
    assert machine is not None  # place_of refuses more ranks than it has GPUs
    return machine


def _print(
    subject: str,
    place: PredictedOn,
    given: tuple[Sequence[Predicted[Any]], dict[str, Any], list[str]],
    file: Path | None,
) -> None:
    """A column for each plan, with the part of the link's time that it hides; the first is the sequential one. given:
    predictions, further columns with what makes a cell, and lines below."""
    found, more, lines = given
    sequential, *overlapped = dict.fromkeys(plan for each in found for plan in each.plans)
    columns = (
        *("", "alone\nus", "link\nus", f"{sequential}\nus"),
        *(f"{plan}\nus ratio" for plan in overlapped),
        *more,
        "chosen",
    )
    cells = []
    for each in found:
        times = (f"{us:.0f}" for us in (each.alone_us, each.link_us, each.plans[sequential]))
        of_plans = (_plan(each, plan) for plan in overlapped)
        cells.append((each.case.name, *times, *of_plans, *(cell(each) for cell in more.values()), each.choice))
    title = f"{subject}: predicted for {place.ranks} ranks, bf16, the slowest rank's"
    print_predictions(place, Predictions(found, title, columns, cells, lines), file)


def _plan(each: Predicted[Any], plan: str) -> str:
    if plan not in each.plans:
        return ""
    ratio = each.measures(plan).overlap_ratio
    return f"{each.plans[plan]:.0f} {'     ' if ratio is None else f'{ratio:5.2f}'}"


def _roof(layer: PredictedLayer) -> str:
    word = "link" if layer.is_bound_by_links else ""
    return f"{layer.roof_us:.0f} {word:4s} {_number(layer.efficiency(layer.roof_us))}"


def _efficiency(plan: str) -> Any:
    return lambda layer: _number(layer.efficiency(layer.plans[plan]) if plan in layer.plans else None)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _skew_lines(layers: Sequence[PredictedLayer]) -> Iterator[str]:
    for plan in PLANS:
        if costs := skew_costs(layers, plan):
            worst = max(costs.values())
            yield f"{plan}, tensor parallel: with a skewed router at most {worst:.3f} of an even one's time"
