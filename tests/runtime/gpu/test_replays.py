"""Which calls become graphs: those whose tensors come back, as many as there is room for, stale ones first to go."""

from __future__ import annotations

from typing import Any

import pytest

from overweave.runtime.gpu import replays
from overweave.runtime.gpu.replays import Replays


class Made:
    """Makes numbers, which stand for graphs."""

    def __init__(self) -> None:
        self.numbers: list[Any] = []

    def __call__(self) -> Any:
        self.numbers.append(len(self.numbers))
        return self.numbers[-1]


def graph_of(kept: Replays, places: tuple[int, ...], made: Made) -> object:
    """As a call asks for it."""
    found = kept.find(places)
    return kept.add(places, made) if found is None else found


@pytest.fixture
def made() -> Made:
    return Made()


def test_the_second_call_is_captured_and_the_third_finds_it(made: Made) -> None:
    kept = Replays()
    assert [graph_of(kept, (1, 2), made) for _ in range(3)] == [None, 0, 0]
    assert made.numbers == [0]


def test_tensors_at_other_places_are_another_graph(made: Made) -> None:
    kept = Replays()
    found = [graph_of(kept, places, made) for places in ((1, 2), (1, 3), (1, 2), (1, 3), (1, 2))]
    assert found == [None, None, 0, 1, 0]


def test_tensors_that_never_come_back_make_no_graph_and_are_forgotten(made: Made) -> None:
    kept = Replays()
    for place in range(replays.MOST_SEEN + 1):
        assert graph_of(kept, (place,), made) is None
    assert graph_of(kept, (0,), made) is None, "it was the first to be forgotten"
    assert graph_of(kept, (replays.MOST_SEEN,), made) == 0


def test_a_full_house_runs_newcomers_step_by_step_until_a_graph_is_stale(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "MOST_GRAPHS", 2)
    monkeypatch.setattr(replays, "STALE_CALLS", 6)
    kept = Replays()
    for place in (1, 1, 2, 2, 3, 3):
        last = graph_of(kept, (place,), made)
    assert last is None, "graph 1 was used four calls ago"
    assert [graph_of(kept, (place,), made) for place in (2, 3)] == [1, 2]
    assert [graph_of(kept, (place,), made) for place in (1, 2, 3)] == [None, 1, 2]
