"""Schedules of attention by name: every one is proven for every number of ranks, and says its own name."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.attention.cases import AttentionCase
from overweave.attention.schedules import schedule_for
from overweave.errors import InputError
from overweave.ir.schedule import Collective, Schedule
from overweave.ir.verify.plan import verify_schedule
from overweave.schedules.records.attention import ATTENTION

HEADS = 840  # which 1 to 8 ranks divide


def schedule(name: str, ranks: int = 3, tokens: int = 7, layout: str = "contiguous") -> Schedule:
    return schedule_for(name, AttentionCase("a", tokens, HEADS, 8, HEADS, layout=layout), ranks)  # type: ignore[arg-type]


def sizes(ranks: int) -> list[tuple[int, str]]:
    """No tokens, ranks without, uneven shards, even ones, both layouts."""
    return [(0, "contiguous"), (1, "contiguous"), (2 * ranks + 1, "contiguous"), (4 * ranks, "zigzag")]


@pytest.mark.parametrize("name", ATTENTION.names())
def test_it_is_proven_as_it_is(name: str):
    for tokens, layout in sizes(3):
        found = schedule(name, 3, tokens, layout)
        assert found.name == name
        assert verify_schedule(found).refusals == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTION.names())
def test_it_is_proven(name: str):
    for ranks in (1, 2, 4, 5, 6, 7, 8):
        for tokens, layout in sizes(ranks):
            assert verify_schedule(schedule(name, ranks, tokens, layout)).refusals == (), (ranks, tokens, layout)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("attention.sequential", "all_gather_keys"),
        ("attention_gradients.sequential", "reduce_scatter_dv"),
        ("attention.heads", "all_to_all_q"),
        ("attention.heads", "all_to_all_out"),
        ("attention_gradients.heads", "all_to_all_dk"),
    ],
)
def test_a_schedule_without_a_collective_is_refused(name: str, what: str):
    whole = schedule(name)
    kept = tuple(each for each in whole.operations if not isinstance(each, Collective) or each.label != what)
    assert len(kept) < len(whole.operations)
    assert verify_schedule(replace(whole, operations=kept)).refusals


def test_sums_of_gradients_are_wide():
    for name in ("attention_gradients.ring", "attention_gradients.per_shard", "attention_gradients.sequential"):
        wide = {each.name for each in schedule(name).buffers if each.dtype == "float32"}
        assert any("dk" in each or "keys" in each for each in wide), name
        assert not {"k", "v", "keys", "values", "keys_around_0"} & wide


def test_what_cannot_be_shared_is_refused():
    for options, found in (
        ({"layout": "zigzag", "tokens": 7}, "no 2 x 3 pieces"),
        ({"groups": 11}, "that divide"),
        ({"window": 2, "layout": "zigzag", "tokens": 12}, "contiguous rows and a causal mask"),
    ):
        case = replace(AttentionCase("a", 7, HEADS, 8, HEADS, layout="contiguous"), **options)
        with pytest.raises(InputError, match=found):
            schedule_for("attention.ring", case, 3)
    with pytest.raises(InputError, match="do not divide"):
        schedule("attention.heads", ranks=11)
    with pytest.raises(InputError, match="nearest first: attention"):
        schedule("attention.rings")
