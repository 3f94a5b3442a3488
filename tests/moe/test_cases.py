"""Layers of experts that are timed and predicted: the sets of the repository, statistics of routings, bad sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overweave.errors import InputError
from overweave.moe.cases import ExpertsCase, Parallel, RoutingStatistics, popularity, read_experts

ROUTINGS = (
    RoutingStatistics(64, 8, 2),
    RoutingStatistics(64, 8, 2, 0.8),
    RoutingStatistics(7, 300, 5, 1.5),
    RoutingStatistics(9, 3, 3, 4.0),
    RoutingStatistics(1, 1, 1),
)


def test_the_usual_set_has_published_layers():
    cases = read_experts("moe").on_ranks(8)
    layers = {each.layer for each in cases}
    assert {f"MoE-{number}" for number in range(1, 7)} | {"Mixtral", "Qwen3-235B", "DeepSeek-V3", "gpt-oss"} <= layers
    assert {(each.parallel, bool(each.routing.skew)) for each in cases} == {
        (parallel, skewed) for parallel in ("tensor", "expert") for skewed in (False, True)
    }
    flash = next(each for each in cases if each.layer == "DeepSeek-V4-Flash")
    assert (flash.routing.experts, flash.routing.topk, flash.hidden, flash.intermediate) == (256, 6, 4096, 2048)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_rows_of_experts_are_all_pairs_and_no_token_is_there_twice(routing: RoutingStatistics):
    rows = routing.rows()
    assert len(rows) == routing.experts
    assert sum(rows) == pytest.approx(routing.pairs)
    assert list(rows) == sorted(rows, reverse=True)
    assert max(rows) <= routing.tokens + 1e-9
    assert routing.skew or max(rows) == pytest.approx(min(rows))


@pytest.mark.parametrize(("experts", "ranks"), [(8, 2), (7, 3), (2, 4), (1, 1)])
def test_popular_experts_are_dealt_over_ranks(experts: int, ranks: int):
    order = popularity(experts, ranks)
    assert sorted(order) == list(range(experts))
    held = -(-experts // ranks)
    first = [expert // held for expert in order[: min(ranks, -(-experts // held))]]
    assert len(set(first)) == len(first)  # the most chosen ones are on as many ranks as hold any


def test_tokens_are_named_and_rounded_up_to_as_many_for_each_rank():
    cases = read_experts("tiny").on_ranks(4, (1, 9))
    assert {each.routing.tokens for each in cases} == {4, 12}
    assert {each.group for each in cases} == {f"{kind} parallel, at most 512 tokens" for kind in ("tensor", "expert")}


def layer(parallel: Parallel = "tensor", hidden: int = 32, intermediate: int = 64, topk: int = 2) -> ExpertsCase:
    return ExpertsCase("a", hidden, intermediate, parallel, RoutingStatistics(16, 4, topk))


@pytest.mark.parametrize(
    ("wrong", "ranks", "found"),
    [
        (layer(intermediate=40), 2, "40 of an expert over 2 ranks"),
        (layer("expert", hidden=12), 2, "hidden 12"),
        (layer(topk=5), 2, "top 5 of 4 experts"),
    ],
)
def test_what_cannot_be_split_is_refused(wrong: ExpertsCase, ranks: int, found: str):
    with pytest.raises(InputError, match=found):
        wrong.check(ranks)


ONE = {"name": "a", "tokens": 16, "hidden": 32, "intermediate": 64, "experts": 4, "topk": 2}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"cases": []}, "length >= 1"),
        ({"cases": [ONE | {"experts": 0}]}, "experts"),
        ({"cases": [ONE], "skews": [-1.0]}, "skews"),
        ({"cases": [ONE], "parallel": ["pipeline"]}, "parallel"),
        ({"cases": [ONE], "operator": "all_gather_matmul"}, "meant for all_gather_matmul"),
        ({"cases": [ONE, ONE]}, "two cases share the name"),
        ({"cases": [ONE | {"intermediate": 24}]}, "Choose multiples of 8"),
    ],
)
def test_a_file_of_another_form_is_refused(content: dict[str, object], found: str, tmp_path: Path):
    file = tmp_path / "it.json"
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match=found):
        read_experts(str(file)).on_ranks(2)
