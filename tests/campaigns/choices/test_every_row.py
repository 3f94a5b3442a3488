"""Every measured row: what is left out is counted, every bar can fail, and contention explains something."""

from __future__ import annotations

from pathlib import Path

from campaigns.choices import sim_accuracy
from campaigns.choices.sim_accuracy import every_verdict, judged, rows, without_contention
from overweave.hardware.machine import load
from tests.campaigns.choices.test_sim_accuracy import written

H200 = load("h200x4")


def test_rows_are_judged_or_counted(tmp_path: Path):
    files = [
        written(tmp_path / "mlp.json", "all_gather_matmul"),
        written(tmp_path / "small.json", "all_gather_matmul"),
        written(tmp_path / "few.json", "all_gather_matmul", m=512),
        tmp_path / "none.json",
    ]
    files[-1].write_text("{}")
    kept, left = rows(files, H200)
    assert len(kept) == 3
    assert left == {
        "rows that a constant was fitted on": 3,
        "rows of problems of fewer than 1024 rows": 3,
        "files without results": 1,
    }
    told = every_verdict(files, H200)
    assert [each.holds for each in told] == [None, True, True, True, True, None]
    assert every_verdict(files[1:], H200)[0].holds is False


def test_each_bar_can_fail(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sim_accuracy, "FEWEST_PLANS", 3)
    monkeypatch.setattr(sim_accuracy, "FIRST", 1)
    wrong = {"sequential": 300.0, "per_shard": 250.0, "overweave": 450.0}
    kept, _ = rows([written(tmp_path / "mlp.json", "all_gather_matmul", wrong)], H200)
    assert [each.holds for each in judged(kept)] == [False, False, False, False, None]


def test_without_contention_nothing_slows_anything():
    free = without_contention(H200)
    assert (free.sharing.copy_engine.factor, free.sharing.collective.sms) == (1.0, 1)
    crowd = free.links.all_peers.peak_gb_per_s / free.links.push.peak_gb_per_s
    assert crowd >= H200.gpus - 1
