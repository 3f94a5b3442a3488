"""Predicted attention: beside what was measured, balanced by zigzag rows, overlapped, and which plan is chosen."""

from __future__ import annotations

import pytest
import torch

from overweave.attention.cases import AttentionCase, read_attention
from overweave.attention.plain import Seen, is_seen
from overweave.attention.predicted import AttentionCosts, predicted, whole_us
from overweave.attention.sequence import Sequence
from overweave.errors import InputError
from overweave.hardware.machine import load
from overweave.schedules.records.attention import PLANS
from tests.attention.test_programs import sequences

# Causal, one sequence of 32 heads of 128 columns, alone on an H200 (cuDNN, 2026-11-28): tokens -> us, both.
MEASURED = {8192: (909, 3456), 16384: (3357, 13910), 32768: (14429, 55516)}


def case(tokens: int, layout: str = "zigzag", **changes: object) -> AttentionCase:
    return AttentionCase("a", tokens, 32, 128, 32, layout=layout, **changes)  # type: ignore[arg-type]


def test_one_gpu_is_near_what_was_measured():
    for tokens, (forward_us, both_us) in MEASURED.items():
        whole, machine = case(tokens), load("h200x2")
        found_us = whole_us(whole, machine)
        assert 0.95 < found_us / forward_us < 1.05
        assert 0.95 < (found_us + whole_us(whole, machine, "backward")) / both_us < 1.05


def test_pairs_are_those_of_the_mask():
    for ranks in (1, 2, 3, 4):
        for sequence in sequences(ranks):
            for rank in range(ranks):
                for source in range(ranks):
                    if (piece := sequence.piece(rank, source)) is not None:
                        shape = tuple(each.stop - each.start for each in (piece.queries, piece.keys))
                        seen = is_seen(shape, Seen(1.0, piece.is_causal, piece.left), torch.device("cpu"))  # type: ignore[arg-type]
                        assert piece.pairs == int(seen.sum()), (sequence, piece)


def test_all_ranks_together_see_what_one_would():
    for sequence in (Sequence(48, 4, True), Sequence(48, 4, True, True), Sequence(48, 4, True, window=5)):
        pieces = [sequence.piece(rank, source) for rank in range(4) for source in range(4)]
        (whole,) = (sequence._replace(ranks=1, is_zigzag=False).piece(0, 0),)
        assert whole is not None
        assert sum(each.pairs for each in pieces if each) == whole.pairs


@pytest.mark.slow
def test_zigzag_rows_are_at_least_1_8_times_as_quick_on_eight_ranks():
    """Of 15 parts of the work of a contiguous sequence the last rank has, of a zigzag one each has 8: at most 1.875."""
    machine = load("h200x8")
    found = [predicted(case(131072, layout), 8, machine).plans for layout in ("contiguous", "zigzag")]
    for plan in ("per_shard", "ring"):
        assert 1.8 <= found[0][plan] / found[1][plan] < 1.875


@pytest.mark.slow
def test_rings_hide_what_travels_of_long_sequences():
    for ranks in (4, 8):
        found = predicted(case(32768), ranks, load(f"h200x{ranks}"))
        assert set(found.plans) == set(PLANS)
        ratio = found.measures("ring").overlap_ratio
        assert ratio is not None
        assert ratio > 0.85


def test_what_is_chosen_is_quicker_by_the_margin_of_what_nobody_measured():
    found = predicted(case(16384), 2, load("h200x2"))
    assert found.choice == "per_shard"
    assert predicted(case(131072), 2, load("h200x2")).choice == "sequential"
    assert found.plans["per_shard"] < 0.88 * found.plans["sequential"]


def test_a_machine_without_a_rate_has_a_guess():
    machine = load("mi300x8")
    assert not machine.attention
    rate = machine.attention_rate("forward", 128)
    assert 0 < rate.tflops < max(tile.tflops for tile in machine.tiles_of("library"))
    assert rate.source.startswith("guess")


def test_heads_that_ranks_do_not_divide_are_left_out():
    few = AttentionCase("a", 4096, 6, 64, 6)
    assert "heads" not in predicted(few, 4, load("h200x4")).plans
    costs = AttentionCosts(few, 4, load("h200x4"), "attention.ring")
    assert costs.rank_us(0) > costs.piece_us(0, 0) > 0


def test_the_repositorys_set_is_read():
    found = read_attention("attention").on_ranks(8)
    assert [each.name for each in found][:2] == [
        "Attn-1.zigzag.causal.tokens=16384",
        "Attn-1.zigzag.causal.tokens=32768",
    ]
    assert len(found) == 2 * 8  # forward, and with gradients
    with pytest.raises(InputError, match="no 2 x 8 pieces"):
        read_attention("attention").on_ranks(8, (100,))
