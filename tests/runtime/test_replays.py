"""Which calls become graphs: those whose tensors come back, as many as there is room for, stale ones first to go."""

from __future__ import annotations

import itertools

import pytest

from overweave.runtime import replays
from overweave.runtime.replays import Replays


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the graphs made so far, which stand for graphs."""
    numbers: list[int] = []
    count = itertools.count()

    def capture(enqueue: object) -> int:
        numbers.append(next(count))
        return numbers[-1]

    monkeypatch.setattr(replays, "_captured", capture)
    return numbers


def call(kept: Replays, *places: int) -> object:
    return kept.graph(places, lambda stream: None)


def test_the_second_call_is_captured_and_the_third_finds_it(made: list[int]) -> None:
    kept = Replays()
    assert [call(kept, 1, 2) for _ in range(3)] == [None, 0, 0]
    assert made == [0]


def test_tensors_at_other_places_are_another_graph(made: list[int]) -> None:
    kept = Replays()
    found = [call(kept, *places) for places in ((1, 2), (1, 3), (1, 2), (1, 3), (1, 2))]
    assert found == [None, None, 0, 1, 0]


def test_tensors_that_never_come_back_make_no_graph_and_are_forgotten(made: list[int]) -> None:
    kept = Replays()
    for place in range(replays.MOST_SEEN + 1):
        assert call(kept, place) is None
    assert call(kept, 0) is None, "it was the first to be forgotten"
    assert call(kept, replays.MOST_SEEN) == 0


def test_a_full_house_runs_newcomers_step_by_step_until_a_graph_is_stale(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "MOST_GRAPHS", 2)
    monkeypatch.setattr(replays, "STALE_CALLS", 6)
    kept = Replays()
    for place in (1, 1, 2, 2, 3, 3):
        last = call(kept, place)
    assert last is None, "graph 1 was used four calls ago"
    assert [call(kept, place) for place in (2, 3)] == [1, 2]
    assert [call(kept, place) for place in (1, 2, 3)] == [None, 1, 2]
