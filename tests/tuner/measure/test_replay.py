from __future__ import annotations

import gc
import weakref
from unittest.mock import MagicMock

import pytest
import torch

from overweave.tuner.measure.baselines import CACHE_BYTES, _input_sets
from overweave.tuner.measure.timer import REPLAYED_ROWS, SIGHTS, Effort, capture_graphs, is_replayed, with_graph_warmup


@pytest.mark.parametrize(
    ("device", "rows", "wanted"),
    [("cuda", 1, True), ("cuda", REPLAYED_ROWS, True), ("cuda", REPLAYED_ROWS + 1, False), ("cpu", 1, False)],
)
def test_decoding_sizes_are_replayed_on_gpus(device: str, rows: int, wanted: bool):
    assert is_replayed(torch.device(device), rows) == wanted


@pytest.mark.parametrize("bytes_per_set", [0, 1, CACHE_BYTES // 3, CACHE_BYTES // 2, CACHE_BYTES * 2])
def test_rounds_that_count_begin_when_eager_calls_are_graphs(bytes_per_set: int):
    """A call becomes a graph when its tensors come for the second time; sets take turns."""
    sets = _input_sets(bytes_per_set)
    warmup = with_graph_warmup(Effort(rounds=15, warmup=3), torch.device("cuda")).warmup
    seen = [turn % sets for turn in range(warmup)]
    assert sets * bytes_per_set >= min(CACHE_BYTES, 4 * bytes_per_set)
    for turn in range(warmup, warmup + 2 * sets):
        assert seen.count(turn % sets) >= SIGHTS


def test_a_longer_warm_up_and_a_cpu_stay_as_asked():
    long, short = Effort(warmup=20), Effort(warmup=1)
    for effort, device in ((long, "cuda"), (long, "cpu"), (short, "cpu")):
        assert with_graph_warmup(effort, torch.device(device)) == effort


@pytest.mark.slow
def test_what_a_call_owns_lives_as_long_as_its_graphs(monkeypatch: pytest.MonkeyPatch):
    """Graphs hold addresses only. One campaign's buffers were gone by the time that its graphs ran."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", MagicMock)
    monkeypatch.setattr(torch.cuda, "graph", MagicMock())

    class Owner:
        def __call__(self, turn: int) -> torch.Tensor:
            return torch.tensor(turn)

    owner = Owner()
    alive, replay = weakref.ref(owner), capture_graphs(owner)
    del owner
    gc.collect()
    assert alive() is not None
    assert int(replay(1)) == 1


def test_each_set_of_inputs_runs_before_any_is_captured(monkeypatch: pytest.MonkeyPatch):
    """A weight that a capture meets first would have its bias or norm made there, which CUDA refuses."""
    said: list[str] = []
    capture = MagicMock()
    capture.return_value.__enter__.side_effect = lambda: said.append("capture")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", MagicMock)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    capture_graphs(lambda turn: said.append(str(turn)))
    assert said == ["0", "1", "2", "3", *(word for turn in range(4) for word in ("capture", str(turn)))]
