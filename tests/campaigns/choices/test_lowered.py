"""Synthesis beside what is written by hand, and plans of other compilers beside ours, in the simulation."""

from __future__ import annotations

import pytest

from campaigns.choices.joined_machines import ring
from campaigns.choices.lowered import matmul_rows, synthesis
from overweave.hardware.machine import load


@pytest.mark.slow
def test_a_search_fills_links_that_one_copy_does_not():
    found = synthesis("ring", ring(), (2,))
    assert found.by_hand.startswith("double_ring")
    assert found.bound_us < found.searched_us < found.by_hand_us / 1.1


@pytest.mark.slow
@pytest.mark.nightly
def test_a_search_is_near_the_best_template_on_a_tree():
    found = synthesis("tree", load("h100_pciex8"), (1,))
    assert found.searched_us < 1.05 * found.by_hand_us


@pytest.mark.slow
@pytest.mark.nightly
def test_pieces_beat_whole_steps():
    rows = {row.name: row for row in matmul_rows(4)}
    assert len(rows) == 4
    assert all(rows[name].theirs_us > 1.2 * rows[name].ours_us for name in rows if "Mercury" not in name)
