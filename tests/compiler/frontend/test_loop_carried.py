"""Loops whose turns come in another order: streamed axes, whose parts are walked as they arrive."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compiler.annotated import STREAMED, fused, refusal

PUSH = "all_gather.push pieces=2"
LAST = "        turns += 1\n"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ([("k_ptrs + start * D", "k_ptrs"), (LAST, "        k_ptrs += BLOCK * D\n")], "k_ptrs"),
        ([("k_ptrs + start * D", "k_ptrs"), (LAST, "        k_ptrs = tl.advance(k_ptrs, (0, BLOCK))\n")], "k_ptrs"),
        ([("k_ptrs + start * D", "k_ptrs + place * D"), (LAST, "        place = place + BLOCK\n")], "place"),
        ([("tl.load(here)", "tl.load(here, mask=(place < S))"), (LAST, "        place += BLOCK\n")], "place"),
        ([("tl.dot(q, k)", "tl.dot(q, k) * turns")], "turns"),
        ([("+ start * D", "+ place * D"), (LAST, "        if start > 0:\n            place += BLOCK\n")], "place"),
        ([("+ start * D", "+ place * D"), (LAST, "        step = BLOCK + place\n        place = step\n")], "place"),
    ],
)
def test_what_counts_on_the_order_of_turns_is_refused(tmp_path: Path, changes: list[tuple[str, str]], name: str):
    said = refusal(tmp_path, STREAMED, PUSH, *changes)
    assert f"{name} goes on from turn to turn" in said
    assert "Make it from start in every turn" in said


@pytest.mark.parametrize(
    "changes",
    [
        [],  # a sum, and a count that only the end reads
        [
            (
                "        total += tl.sum(tl.dot(q, k), 1)\n",
                "        s = tl.dot(q, k)\n        total = total + tl.sum(s, 1)\n",
            )
        ],
        [("        here = ", "        place = start * 2\n        place += 1\n        here = ")],
    ],
)
def test_what_does_not_is_welcome(tmp_path: Path, changes: list[tuple[str, str]]):
    assert "overweave_arrived" in fused(tmp_path, STREAMED, PUSH, *changes).source()
