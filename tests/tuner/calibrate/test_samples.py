"""Where no calibration between GPUs can be made: no GPU is asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

samples = pytest.importorskip("overweave.tuner.calibrate.latencies", reason="no CUDA bindings here")
from overweave.errors import MachineError  # noqa: E402


def test_ranks_whose_gpus_do_not_reach_each_other_are_sent_to_one_rank(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(samples, "resolve", lambda group: SimpleNamespace(rank=0, world_size=2))
    monkeypatch.setattr(samples, "group_has_peer_access", lambda group, device: False)
    with pytest.raises(MachineError, match="Calibrate on one rank"):
        samples.Bench(torch.device("cuda", 0))
