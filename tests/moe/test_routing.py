"""Routing as callers see it on a CPU: the tables, beside a loop over pairs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overweave.errors import InputError
from overweave.ir.shards import shard_rows
from overweave.moe import route
from overweave.moe.routing import NO_EXPERT

SHAPES = ((50, 3, 7), (1, 1, 1), (0, 2, 3), (40, 8, 3), (9, 2, 300))


@pytest.mark.parametrize(("tokens", "top", "experts"), SHAPES)
@pytest.mark.parametrize("sources", [1, 3, 8])
def test_tables_are_those_of_a_loop_over_pairs(tokens: int, top: int, experts: int, sources: int):
    torch.manual_seed(0)
    ids = torch.randint(NO_EXPERT, experts, (tokens, top), dtype=torch.int32)
    tables = route(ids, experts, sources)
    pairs = [(expert, pair) for pair, expert in enumerate(ids.flatten().tolist())]
    ordered = sorted(pairs, key=lambda one: experts if one[0] == NO_EXPERT else one[0])
    assert tables.order.tolist() == [pair for _, pair in ordered]
    assert [tables.places[pair].item() for _, pair in ordered] == list(range(tokens * top))
    assert tables.tokens.tolist() == [pair // top for _, pair in ordered]
    assert tables.counts.tolist() == [sum(one == expert for one, _ in pairs) for expert in range(experts)]
    assert tables.offsets.tolist() == [sum(tables.counts[:expert].tolist()) for expert in range(experts + 1)]
    for source in range(sources):
        first, _ = shard_rows(tokens, sources, source)
        for expert, begin in enumerate(tables.bounds[source].tolist()):
            low, high = tables.offsets[expert : expert + 2].tolist()
            assert begin == low + sum(token < first for token in tables.tokens[low:high].tolist())
    assert tables.reason.item() == 0


@pytest.mark.slow
def test_a_compiler_sees_the_whole_of_it():
    ids = torch.randint(0, 4, (20, 2), dtype=torch.int32)
    compiled = torch.compile(lambda ids: route(ids, 4).places + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ids), route(ids, 4).places + 1)


REFUSED: dict[str, dict[str, Any]] = {
    "an id beyond the experts": {"topk_ids": torch.tensor([[4]], dtype=torch.int32)},
    "an id below none": {"topk_ids": torch.tensor([[-2]], dtype=torch.int32)},
    "int64": {"topk_ids": torch.zeros(2, 2).long()},
    "one dimension": {"topk_ids": torch.zeros(2, dtype=torch.int32)},
    "a list": {"topk_ids": [[1]]},
    "no expert": {"experts": 0},
    "a broken number of experts": {"experts": 2.0},
    "no source": {"sources": 0},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str):
    given = {"topk_ids": torch.zeros(2, 2, dtype=torch.int32), "experts": 4} | REFUSED[name]
    with pytest.raises(InputError):
        route(**given)
