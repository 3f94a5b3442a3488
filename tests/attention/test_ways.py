"""Every way to compute attention over a shared sequence, on emulated ranks: they agree, and a wrong one is left out."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace

from overweave.attention import library_ways
from overweave.attention.cases import ATTENTION, AttentionCase
from overweave.attention.ways import LIBRARY_WAYS, ROTATIONS, attention_runs
from overweave.memory.group import resolve
from overweave.schedules.records.attention import PLANS
from overweave.tuner.measure.baselines import OURS, SEQUENTIAL
from overweave.tuner.measure.bench import BenchRequest
from overweave.tuner.measure.timer import Effort
from tests.ranks import run_ranks

CASE = AttentionCase("a", 24, 6, 8, 6)


def rows(plans: tuple[str, ...], **changes: Any) -> list[Any]:
    """For `run_ranks`: the plans of ours that ran, the names of all rows, and why others were left out."""
    request = BenchRequest(
        operator=ATTENTION, device="cpu", dtype="fp32", plans=plans, effort=Effort(rounds=2, warmup=1)
    )
    (found,) = attention_runs((replace(CASE, **changes),), request, resolve(None))
    (measured,) = found.cases
    return [
        [row.plan for row in measured.methods if row.plan],
        [row.name for row in measured.methods],
        measured.left_out,
    ]


def of(**changes: Any) -> list[Any]:
    return rows((), **changes)


def trained_of_contiguous_rows() -> list[Any]:
    return of(is_trained=True, layout="contiguous")


def of_grouped_heads_all_seen() -> list[Any]:
    return of(groups=3, is_causal=False, layout="contiguous")


@pytest.mark.slow
@pytest.mark.parametrize("call", [of, trained_of_contiguous_rows, of_grouped_heads_all_seen])
def test_all_ways_agree(call: Any):
    for ran, names, left_out in run_ranks(call, 3, timeout_s=120):
        assert ran == list(PLANS)
        assert {OURS, SEQUENTIAL, "library_heads"} <= set(names)
        assert set(left_out) == set(ROTATIONS)  # which has no kernels of a CPU


def with_a_wrong_library() -> list[Any]:
    """Whose exchange forgets in which order rows are stored."""
    with patch.object(library_ways, "zigzag_order", lambda rows, ranks, device: torch.arange(rows)):
        return rows(("ring",))


@pytest.mark.slow
def test_a_way_that_is_wrong_is_left_out():
    for ran, names, left_out in run_ranks(with_a_wrong_library, 2):
        assert SEQUENTIAL in names  # with which others are compared, and from which ours differs then
        assert ran == []
        assert "differs" in left_out["plan.ring"]


def of_heads_that_ranks_do_not_divide() -> list[Any]:
    return rows(("heads", "ring"), heads=5, groups=5)


@pytest.mark.slow
def test_heads_that_ranks_do_not_divide_are_left_out_with_the_reason():
    for ran, _, left_out in run_ranks(of_heads_that_ranks_do_not_divide, 2):
        assert ran == ["ring"]
        assert "do not divide" in left_out["plan.heads"]
        assert "do not divide" in left_out["library_heads"]


def test_the_rows_have_names_of_their_own():
    names = [way.name for way in LIBRARY_WAYS]
    assert len(set(names)) == len(names)
