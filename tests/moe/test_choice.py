"""Which plan a layer of experts gets: what is asked, or what measurements say of many tokens on GPUs."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from overweave.errors import InputError
from overweave.moe import overlapped
from overweave.moe.overlapped import LEAST_BYTES, choose, pushing_is_quicker
from overweave.moe.programs import TILE_COLUMNS, Sizes
from overweave.ops.dispatch.route import GroupRank
from overweave.schedules.records.experts import PUSH, SEQUENTIAL

GPU, PLACE = torch.device("cuda", 0), GroupRank("group", 2, 0)


def test_what_is_asked_is_done_or_refused():
    assert choose("layer", SEQUENTIAL, "", True) == SEQUENTIAL
    assert choose("layer", PUSH, "", False) == PUSH
    assert [choose("layer", None, reason, True) for reason in ("", "odd rows")] == [PUSH, SEQUENTIAL]
    assert choose("layer", None, "", False) == SEQUENTIAL
    for plan, reason in (("ring", ""), (PUSH, "odd rows")):
        with pytest.raises(InputError):
            choose("layer", plan, reason, True)


@pytest.mark.parametrize("reaches", [True, False])
def test_many_tokens_are_pushed_where_gpus_reach_each_other(reaches: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overlapped, "group_of", lambda name: SimpleNamespace(lock=nullcontext()))
    monkeypatch.setattr(overlapped, "load", lambda backend: lambda group, device: reaches)
    assert pushing_is_quicker(PLACE, GPU, LEAST_BYTES) == reaches
    assert not pushing_is_quicker(PLACE, GPU, LEAST_BYTES - 1)
    assert not pushing_is_quicker(GroupRank("group", 1, 0), GPU, LEAST_BYTES)
    assert not pushing_is_quicker(PLACE, torch.device("cpu"), LEAST_BYTES)


def test_columns_are_cut_where_tiles_end():
    for columns in (8, 16, 32, 40, 1024, 2048, 2880, 4096, 7168):
        cuts = Sizes(64, columns, 2, torch.bfloat16, 2).cuts
        assert [high for _, high in cuts[:-1]] == [low for low, _ in cuts[1:]]
        assert (cuts[0][0], cuts[-1][1]) == (0, columns)
        assert all(low < high and low % min(TILE_COLUMNS, columns // 4 // 8 * 8 or 1) == 0 for low, high in cuts)
        assert len(cuts) == (2 if columns >= 32 else 1)


def test_more_launches_are_made_where_their_copies_are_large():
    widths = [[high - low for low, high in Sizes(m, 2048, 2, torch.bfloat16, 4).cuts] for m in (256, 4096, 8192, 65536)]
    assert widths == [[1536, 512], [768, 1024, 256], [512, 768, 512, 256], [512, 768, 512, 256]]


def test_own_tokens_of_as_many_experts_come_first_as_outlast_the_journey():
    two, eight = Sizes(8192, 2048, 2, torch.bfloat16, 2), Sizes(8192, 2048, 2, torch.bfloat16, 8)
    assert two.experts_ahead(32, 1536) == 24
    assert eight.experts_ahead(32, 1536) == 32
    assert two.experts_ahead(32, 1 << 20) == 1
    assert Sizes(8, 8, 1, torch.bfloat16, 1).experts_ahead(4, 8) == 0
