"""Gradients are those of one process in every situation of the table, and the table sees faults that there were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from overweave.adapters.parallel import gathering, styles
from overweave.adapters.rows import RowGather
from overweave.layers import replicated
from tests.ranks import run_ranks
from tests.torch.situations.circumstances import CIRCUMSTANCES
from tests.torch.situations.models import OUTSIDE, PACKAGES
from tests.torch.situations.table import RANKS, Cell, cells, judged, verdicts
from tests.torch.situations.ways import WAYS

BY_DAY = ("plain", "autocast", "accumulation", "checkpoint", "a deep copy", "a split backward", "full backward hooks")
WHOLE_BY_DAY = "styles, sequence"


def check(asked: list[Cell]) -> None:
    """Names each cell that is wrong, all of them: pytest shortens a list."""
    print(f"{len(asked)} cells")
    wrong = [f"{verdict.cell}: {verdict.wrong}" for verdict in judged(asked) if verdict.wrong]
    if wrong:
        pytest.fail("\n".join([f"{len(wrong)} verdicts of {len(asked)} cells:", *wrong]), pytrace=False)


@pytest.mark.slow
def test_styles_that_gather_are_right_in_every_situation():
    """What fell back to torch in a circumstance that leaves all sites fused is wrong, too."""
    check(list(cells(WHOLE_BY_DAY)))


@pytest.mark.slow
def test_every_way_is_right_in_some_situations():
    check(list(by_day()))


def by_day() -> Iterator[Cell]:
    for way, known in WAYS.items():
        if known.is_compiled:
            yield from cells(way, ("plain", "accumulation"), ("mlp",))
        elif way != WHOLE_BY_DAY:
            yield from cells(way, BY_DAY)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("way", [way for way, known in WAYS.items() if known.is_compiled])
def test_graphs_are_right_when_they_are_new_and_when_they_are_kept(way: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for _ in ("cold", "warm"):
        check(list(cells(way, BY_DAY)))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("model", PACKAGES)
def test_layers_of_other_packages_are_right_in_every_situation(model: str):
    if model not in OUTSIDE:
        pytest.skip(f"{PACKAGES[model][0]} is not installed")
    check([cell for way in WAYS for cell in cells(way, models=[model])])


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("way", [way for way in WAYS if way != WHOLE_BY_DAY])
def test_every_way_is_right_in_every_situation(way: str):
    check(list(cells(way)))


def test_there_are_four_hundred_cells_by_day():
    asked = [*cells(WHOLE_BY_DAY), *by_day()]
    assert len(set(asked)) >= 400
    assert set(BY_DAY) <= set(CIRCUMSTANCES)


OWN = RowGather.own
# What was wrong once: what is put in the place of what, and the circumstances that must show it.
FAULTS = {
    "the gradient of a reader counts on every rank": (
        (RowGather, "own", lambda gather, gathered: OWN(gather, gathered) * RANKS),
        ("a scale between", "a function between", "full backward hooks", "CommDebugMode"),
    ),
    "what is gathered has no history": (
        (styles, "gather_lazily", lambda shard, gather: gathering.LazyGather(shard.detach(), gather)),
        ("plain", "a look under no_grad", "full backward pre-hooks", "checkpoint inside, reentrant"),
    ),
    "a subclass loses its forward": ((styles, "_layer_obstacle", lambda *_: ""), ("plain",)),
    "factors are not cast": ((replicated, "is_autocast", lambda: False), ("autocast",)),
    "a weight is read after its step": ((gathering, "_may_step_early", lambda _: False), ("optimizer in backward",)),
    "a mode sees what is computed once": (
        (gathering.LazyGather, "_has_creation_modes", lambda _: True),
        ("selective checkpoint inside", "selective checkpoint of layers"),
    ),
    "a layer that FSDP2 frees is read later": ((styles, "hasattr", lambda *_: False), ("FSDP2 of layers",)),
}


def verdicts_with(fault: str, asked: list[Cell]) -> list[tuple[Cell, str, tuple[str, ...]]]:
    """For `run_ranks`: of cells where a fault is back."""
    (owner, name, broken), _ = FAULTS[fault]
    with patch.object(owner, name, broken, create=True):
        return [tuple(each) for each in verdicts(asked)]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_table_sees_a_fault(fault: str):
    circumstances = FAULTS[fault][1]
    ways = ("styles, whole",) if fault == "factors are not cast" else (WHOLE_BY_DAY,)
    asked = [cell for way in ways for cell in cells(way, circumstances) if cell.model in ("mlp", "tied", "subclassed")]
    found = run_ranks(verdicts_with, RANKS, fault, asked, timeout_s=100.0)
    seen = {cell[2] for rank in found for cell, wrong, _ in rank if wrong}
    assert seen == set(circumstances)
