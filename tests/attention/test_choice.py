"""Which plan attention gets: what is predicted on GPUs, and the library's elsewhere."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from overweave.attention import choice
from overweave.attention.cases import AttentionCase
from overweave.attention.choice import quickest
from overweave.attention.predicted import predicted
from overweave.hardware.machine import Machine, load
from overweave.ops.dispatch.route import GroupRank
from overweave.schedules.records.attention import PER_SHARD, SEQUENTIAL

GPU, PLACE, ZIGZAG = torch.device("cuda", 0), GroupRank("group", 2, 0), (True, "zigzag", None, False)
SIZES = (1, 32, 32, 16384, 128)


def on(machine: Machine | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "group_of", lambda name: SimpleNamespace(lock=nullcontext()))
    monkeypatch.setattr(choice, "target_of", lambda device, group: SimpleNamespace(machine=lambda ranks: machine))


def test_gpus_get_what_is_predicted(monkeypatch: pytest.MonkeyPatch):
    on(load("h200x2"), monkeypatch)
    assert quickest(PLACE, GPU, SIZES, ZIGZAG) == PER_SHARD
    assert quickest(PLACE, GPU, (1, 32, 32, 131072, 128), ZIGZAG) == SEQUENTIAL  # there is little to hide
    case = AttentionCase("", 16384, 32, 128, 32, is_trained=True)
    assert quickest(PLACE, GPU, SIZES, (*ZIGZAG[:3], True)) == predicted(case, 2, load("h200x2")).choice


@pytest.mark.parametrize("device", [GPU, torch.device("cpu")])
def test_others_get_the_librarys(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    on(None, monkeypatch)  # a card that nobody described
    assert quickest(PLACE, device, SIZES, ZIGZAG) == SEQUENTIAL
    assert quickest(GroupRank("group", 1, 0), device, SIZES, ZIGZAG) == SEQUENTIAL


def test_gpus_that_do_not_reach_each_other_get_what_the_library_moves(monkeypatch: pytest.MonkeyPatch):
    on(load("rtx4090x4"), monkeypatch)
    found = {quickest(GroupRank("group", 4, 0), GPU, (1, 32, 32, rows, 128), ZIGZAG) for rows in (4096, 16384)}
    assert found <= {SEQUENTIAL, "heads"}
