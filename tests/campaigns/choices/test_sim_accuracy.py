"""The accuracy of the simulator: a real case passes, and each of the claims can fail."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from campaigns.choices import sim_accuracy
from campaigns.choices.sim_accuracy import (
    Row,
    every_verdict,
    judged,
    main,
    read,
    rows,
    simulated,
    verdicts,
    without_contention,
)
from overweave.errors import InputError
from overweave.hardware.machine import load

# What is read of a result file: the middle run, the plan that was measured, and how sure the numbers are.

CASE = {"name": "c", "m": 4096, "n": 2048, "k": 1024}


def written_runs(path: Path, *runs: dict[str, tuple[float, float]], plan: str = "", device: str = "cuda") -> Path:
    """A result file of one case. runs: (median, p90) by method; the first one is the middle one."""

    def run(times: dict[str, tuple[float, float]]) -> dict[str, object]:
        methods = [{"name": name, "median_us": us, "p90_us": p90, "plan": plan} for name, (us, p90) in times.items()]
        cases = [{"case": CASE, "methods": methods}]
        effort = {"rounds": 25}
        return {
            "operator": "all_gather_matmul", "world_size": 4, "device": device, "dtype": "bf16", "effort": effort,
            "cases": cases,
        }  # fmt: skip

    path.write_bytes(msgspec.json.encode({"runs": [run(times) for times in runs], "middle": 0}))
    return path


def test_a_row_is_one_ranks_part_of_the_problem(tmp_path: Path):
    times = {"matmul": (100.0, 100.0), "sequential": (150.0, 150.0), "ceiling": (105.0, 105.0)}
    (row,) = read(written_runs(tmp_path / "a.json", times), load("h200x4"))
    assert (row.problem.m, row.problem.n, row.problem.k, row.problem.world_size) == (4096, 512, 1024, 4)
    assert (row.schedule, row.options) == ("all_gather_matmul.sequential", {})
    assert row.exposed_us == 50


def test_what_is_no_result_file_is_refused(tmp_path: Path):
    broken = tmp_path / "b.json"
    broken.write_text('{"runs": [], "middle": 0}')
    on_cpu = written_runs(tmp_path / "c.json", {"matmul": (1.0, 1.0)}, device="cpu")
    for path, cure in ((broken, "bench --json"), (tmp_path / "absent.json", "bench --json"), (on_cpu, "H200")):
        with pytest.raises(InputError, match=cure):
            read(path, load("h200x4"))


# 4 x H200, 2026-11-20: what `overweave bench` wrote of MLP-2, and the end of the first of two runs.
MEASURED_US = {
    "all_gather_matmul": {"matmul": 315.7, "sequential": 502.3, "per_shard": 380.6, "overweave": 331.7},
    "matmul_reduce_scatter": {"matmul": 316.8, "sequential": 502.8, "per_shard": 493.0, "overweave": 354.2},
}
SHAPES = {"all_gather_matmul": (8192, 14336, 4096), "matmul_reduce_scatter": (8192, 4096, 14336)}
TOTAL, EXPOSED, DISTINCT, IN_SUM, ORDER = range(5)


def written(path: Path, operator: str, changed: dict[str, float] | None = None, m: int | None = None) -> Path:
    """A result file of one case with two runs, of which the second is the middle one."""
    times = MEASURED_US[operator] | {"ceiling": 322.0} | (changed or {})
    methods = [{"name": name, "label": "", "median_us": us, "p90_us": us + 2} for name, us in times.items()]
    sizes = dict(zip("mnk", SHAPES[operator], strict=True)) | ({} if m is None else {"m": m})
    cases = [{"case": {"name": "MLP-2", **sizes}, "methods": methods, "left_out": {}}]
    run = {
        "operator": operator, "world_size": 4, "device": "cuda", "dtype": "bf16", "effort": {"rounds": 30},
        "cases": cases,
    }  # fmt: skip
    report = {"command": "overweave bench", "runs": [run | {"cases": []}, run], "middle": 1, "spread": {}}
    path.write_bytes(msgspec.json.encode(report))
    return path


def test_layers_of_experts_are_no_rows_of_an_operator(tmp_path: Path):
    file = written(tmp_path / "experts.json", "all_gather_matmul")
    machine = load("h200x4")
    assert read(file, machine)
    file.write_text(file.read_text().replace("all_gather_matmul", "experts"))
    assert read(file, machine) == []


def rows_of(path: Path) -> list[Row]:
    machine = load("h200x4")
    return [simulated(measured, machine) for measured in read(path, machine)]


@pytest.mark.parametrize("operator", list(MEASURED_US))
def test_a_measured_case_is_predicted(operator: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(written(tmp_path / "a.json", operator))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-5:]] == ["pass"] * 5
    assert len(lines) == 1 + 3 + 5


@pytest.mark.parametrize(
    ("changed", "fails"),
    [
        ({"sequential": 560.0}, {TOTAL}),  # 10 % off, and the order as it was
        ({"matmul": 330.0}, {EXPOSED, DISTINCT}),  # 1.7 us exposed in place of 14
        ({"matmul": 331.5}, {EXPOSED}),  # 0.2 us, which is no more than noise
        ({"overweave": 339.0, "per_shard": 356.5}, set()),  # 5.2 % apart, still in order
        ({"overweave": 366.0, "per_shard": 348.0}, {TOTAL, EXPOSED, DISTINCT, ORDER}),
        ({"sequential": 333.0, "per_shard": 333.0, "overweave": 333.0}, {TOTAL, EXPOSED, DISTINCT, IN_SUM}),
    ],
)
def test_each_claim_can_fail(changed: dict[str, float], fails: set[int], tmp_path: Path):
    found = verdicts(rows_of(written(tmp_path / "a.json", "all_gather_matmul", changed)))
    assert {place for place, verdict in enumerate(found) if not verdict.holds} == fails


def test_exposed_communication_is_what_exceeds_the_matmul_alone():
    row = Row(
        where=("o", "c"), method="m", is_judged=True, predicted_us=120, measured_us=110, predicted_matmul_us=100,
        measured_matmul_us=95, noise_us=14,
    )  # fmt: skip
    assert row.exposed_us == (20, 15)
    assert row.exposed_error == pytest.approx(1 / 3)
    assert row.is_distinct
    assert not msgspec.structs.replace(row, measured_us=81).is_distinct
    assert msgspec.structs.replace(row, measured_us=94.9).exposed_error == pytest.approx(20.1)


def test_by_a_calibrated_file_the_mean_error_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    files = [str(written(tmp_path / f"{operator}.json", operator)) for operator in MEASURED_US]
    assert main(["--calibrated", *files]) == 2  # no GPU here
    monkeypatch.setattr(sim_accuracy, "_calibrated", lambda: load("h200x4"))
    assert main(["--calibrated", *files]) == 0
    assert "PASS  mean error at most 6% by the calibrated file" in capsys.readouterr().out
    slow = [str(written(tmp_path / f"{operator}.json", operator, {"sequential": 700.0})) for operator in MEASURED_US]
    assert main(["--calibrated", *slow]) == 1


# Every measured row: what is left out is counted, every bar can fail, and contention explains something.

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
