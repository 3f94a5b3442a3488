"""A choice in words: what runs and why, how that is known, what it gains, and what is known of the others."""

from __future__ import annotations

from overweave.tuner.model.candidate_model import Weighed
from overweave.tuner.model.choose import Choice, candidate_counts

WEIGHTS = (
    Weighed("sequential", predicted_us=30.0, measured_us=24.0),
    Weighed("push pieces=1", predicted_us=10.0, measured_us=16.0),
    Weighed("push pieces=2", predicted_us=11.0),
    Weighed("pull", obstacle="it cannot"),
    Weighed("torch.fused"),
)
CHOICE = Choice(
    "all_gather_matmul.push", {"pieces": 1}, "it was the quickest of 2", source="cache", text="push pieces=1",
    weights=WEIGHTS, library="sequential",
)  # fmt: skip


def test_sentences_come_before_the_table():
    assert str(CHOICE).splitlines() == [
        "all_gather_matmul.push runs with pieces=1, because it was the quickest of 2.",
        "Its time was measured on this machine.",
        "Measured, it takes 16.0 us and the library path 24.0 us: 1.50 times as fast.",
        "Candidates: 2 measured, 1 simulated only, 1 cannot run here, of 1 nothing is known.",
        "     sequential     predicted 30.0 us, measured 24.0 us",
        "  -> push pieces=1  predicted 10.0 us, measured 16.0 us",
        "     push pieces=2  predicted 11.0 us",
        "     pull           not: it cannot",
        "     torch.fused    nothing known",
    ]


def test_rows_say_what_is_known_of_each():
    states = [state for state, _ in CHOICE.rows()]
    assert states == ["measured", "measured", "simulated", "impossible", "unknown"]


def test_the_library_path_gains_nothing_over_itself():
    library = Choice(
        "all_gather_matmul.sequential", {}, "why", text="sequential", weights=WEIGHTS, library="sequential"
    )
    assert len(library.sentences()) == 3
    assert candidate_counts(()) == []
