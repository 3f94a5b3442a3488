"""`make gpu-test` runs every GPU campaign that checks something, with options that the campaign has."""

from __future__ import annotations

import os
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from campaigns import gpu_ranks
from overweave.errors import MachineError
from overweave.hardware.multicast import WITHOUT
from overweave.tuner.measure.bench import SHARED_GPU
from tests.gpu.test_campaigns import CAMPAIGNS
from tests.source_tree import ROOT

ENDS = re.compile(r"report\.finish\(\)|run_campaign\(")
SOURCES = {path.stem: path.read_text() for path in (ROOT / "campaigns").rglob("gpu_*.py")}


def test_every_campaign_that_ends_with_a_verdict_has_a_short_run():
    judging = {name for name, source in SOURCES.items() if ENDS.search(source)} - {"gpu_ranks"}
    assert {module for module, *_ in CAMPAIGNS.values()} == judging


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_its_options_are_there(name):
    module, *options = CAMPAIGNS[name]
    known = SOURCES[module] + SOURCES["gpu_ranks"] * ("run_campaign(" in SOURCES[module])
    missing = [word for word in options if word.startswith("--") and f'"{word}"' not in known]
    assert missing == []


@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if '__name__ == "__main__"' in source])
def test_without_gpus_each_says_so_at_once(name):
    main = SOURCES[name].partition("\ndef main(")[2].split("\n\n\n")[0]
    assert re.search(r"need_gpus\(\)|join\(|run_campaign\(", main)


def test_what_they_say(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for count, told in ((0, "torch sees none"), (1, "--nproc-per-node 2")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(SystemExit, match=told):
            gpu_ranks.join(timedelta(seconds=1))


@pytest.mark.parametrize("name", WITHOUT)
def test_where_multicast_is_on_none_starts(monkeypatch, name: str):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv(name)
    for start in (gpu_ranks.need_gpus, lambda: gpu_ranks.join(timedelta(seconds=1))):
        with pytest.raises(MachineError, match=f"{name} not set"):
            start()


@pytest.mark.parametrize(
    ("gpus", "ranks", "backend", "device"), [(4, 4, "nccl", 3), (2, 4, "gloo", 1), (1, 4, "gloo", 0)]
)
def test_more_ranks_than_gpus_share_them(monkeypatch, gpus: int, ranks: int, backend: str, device: int):
    joined = []
    monkeypatch.setattr(os, "environ", {**WITHOUT, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": str(ranks)})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda own: joined.append(own.index))
    store = dist.HashStore()
    for rank in range(ranks):
        store.set(f"started {rank}", "")
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(store, 3, ranks)]))
    monkeypatch.setattr(dist, "init_process_group", lambda name, **options: joined.append(name))
    assert gpu_ranks.join(timedelta(seconds=1)).index == device
    assert joined == [device, backend]
    assert (SHARED_GPU.items() <= os.environ.items()) == (backend == "gloo")
