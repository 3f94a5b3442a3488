"""Routing as callers see it on a CPU: the tables, beside a loop over pairs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overweave.errors import InputError
from overweave.moe import route
from overweave.moe.routing import NO_EXPERT, most_tiles

SHAPES = ((50, 3, 7), (1, 1, 1), (0, 2, 3), (40, 8, 3), (9, 2, 300))


@pytest.mark.parametrize(("tokens", "top", "experts"), SHAPES)
@pytest.mark.parametrize("block_m", [1, 16])
def test_tables_are_those_of_a_loop_over_pairs(tokens: int, top: int, experts: int, block_m: int):
    torch.manual_seed(0)
    ids = torch.randint(NO_EXPERT, experts, (tokens, top), dtype=torch.int32)
    starts = torch.tensor([0, tokens // 3, tokens // 3, tokens], dtype=torch.int32)
    tables = route(ids, experts, block_m, starts)
    pairs = [(expert, pair) for pair, expert in enumerate(ids.flatten().tolist())]
    ordered = sorted(pairs, key=lambda one: experts if one[0] == NO_EXPERT else one[0])
    assert tables.order.tolist() == [pair for _, pair in ordered]
    assert [tables.places[pair].item() for _, pair in ordered] == list(range(tokens * top))
    assert tables.tokens.tolist() == [pair // top for _, pair in ordered]
    assert tables.counts.tolist() == [sum(one == expert for one, _ in pairs) for expert in range(experts)]
    assert tables.offsets.tolist() == [sum(tables.counts[:expert].tolist()) for expert in range(experts + 1)]
    covered = [row for _, first, rows in tables.tiles.tolist() for row in range(first, first + rows)]
    assert covered == list(range(int(tables.offsets[-1])))
    assert int(tables.tile_count) == sum(rows > 0 for _, _, rows in tables.tiles.tolist())
    assert int(tables.tile_count) <= most_tiles(tokens * top, experts, block_m) == len(tables.tiles)
    for (expert, first, rows), sources in zip(tables.tiles.tolist(), tables.sources.tolist(), strict=True):
        read = [tables.tokens[row].item() for row in range(first, first + rows)]
        assert all(ordered[row][0] == expert for row in range(first, first + rows))
        if rows:
            owners = [max(s for s in range(3) if starts[s] <= token) for token in read]
            assert sources == [min(owners), max(owners)]
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
    "no expert": {"experts": 0},
    "no height": {"block_m": 0},
    "starts of int64": {"starts": torch.tensor([0, 2])},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str):
    given = {"topk_ids": torch.zeros(2, 2, dtype=torch.int32), "experts": 4} | REFUSED[name]
    with pytest.raises(InputError):
        route(**given)
