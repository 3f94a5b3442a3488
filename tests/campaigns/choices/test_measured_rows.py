"""What is read of a result file: the middle run, the plan that was measured, and how sure the numbers are."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from campaigns.choices.measured_rows import read
from overweave.errors import InputError
from overweave.hardware.machine import load
from overweave.tuner.space.shapes import DTYPES

CASE = {"name": "c", "m": 4096, "n": 2048, "k": 1024}


def written(path: Path, *runs: dict[str, tuple[float, float]], plan: str = "", device: str = "cuda") -> Path:
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
    (row,) = read(written(tmp_path / "a.json", times), load("h200x4"))
    assert (row.problem.m, row.problem.n, row.problem.k, row.problem.world_size) == (4096, 512, 1024, 4)
    assert (row.schedule, row.options) == ("all_gather_matmul.sequential", {})
    assert row.exposed_us == 50


def test_every_dtype_that_a_bench_has_is_read(tmp_path: Path):
    path = written(tmp_path / "a.json", {"matmul": (100.0, 100.0), "sequential": (150.0, 150.0)})
    for word, dtype in DTYPES.items():
        path.write_text(path.read_text().replace('"bf16"', f'"{word}"'))
        (row,) = read(path, load("h200x4"))
        assert row.problem.dtype == dtype
        path.write_text(path.read_text().replace(f'"{word}"', '"bf16"'))


def test_noise_is_the_scatter_of_samples_or_the_spread_of_runs(tmp_path: Path):
    one = {"matmul": (100.0, 103.0), "sequential": (150.0, 154.0)}
    (row,) = read(written(tmp_path / "a.json", one), load("h200x4"))
    assert row.noise_us == pytest.approx(1.96 * 1.2533 * (5 / 1.2816) / 5, rel=1e-3)  # 3 and 4 make 5; 25 rounds
    others = [{"matmul": (100.0, 103.0), "sequential": (us, us)} for us in (149.0, 152.0)]
    (row,) = read(written(tmp_path / "b.json", one, *others), load("h200x4"))
    assert row.noise_us == pytest.approx(1.96 * 1.2533 * (5 / 1.2816) / 5, rel=1e-3)  # half of 3 is less
    far = {"matmul": (100.0, 103.0), "sequential": (170.0, 170.0)}
    (row,) = read(written(tmp_path / "c.json", one, far), load("h200x4"))
    assert row.noise_us == 10


def test_the_plan_is_the_one_that_was_measured(tmp_path: Path):
    times = {"matmul": (100.0, 100.0), "overweave": (110.0, 110.0), "plan.push pieces=2": (120.0, 120.0)}
    chosen, named = read(written(tmp_path / "a.json", times), load("h200x4"))
    assert (chosen.schedule, chosen.options["split_n"]) == ("all_gather_matmul.push", 1)
    assert (named.method, named.options["pieces"], named.options["split_n"]) == ("push pieces=2", 2, 1)
    (told, _) = read(written(tmp_path / "b.json", times, plan="pull kernel=portable"), load("h200x4"))
    assert (told.schedule, told.options) == ("all_gather_matmul.pull", {"kernel": "portable", "sms": 132, "pieces": 1})
    (told, _) = read(written(tmp_path / "c.json", times, plan="sequential"), load("h200x4"))
    assert (told.schedule, told.options) == ("all_gather_matmul.sequential", {})


def test_what_has_no_schedule_is_no_row(tmp_path: Path):
    times = {"matmul": (100.0, 100.0), "overweave": (110.0, 110.0)}
    for plan in ("torch.fused", "gone pieces=2"):
        assert read(written(tmp_path / "a.json", times, plan=plan), load("h200x4")) == []
    named = times | {"plan.gone pieces=2": (90.0, 90.0)}
    (row,) = read(written(tmp_path / "b.json", named), load("h200x4"))
    assert row.method == "overweave"


def test_what_is_no_result_file_is_refused(tmp_path: Path):
    broken = tmp_path / "b.json"
    broken.write_text('{"runs": [], "middle": 0}')
    on_cpu = written(tmp_path / "c.json", {"matmul": (1.0, 1.0)}, device="cpu")
    for path, cure in ((broken, "bench --json"), (tmp_path / "absent.json", "bench --json"), (on_cpu, "H200")):
        with pytest.raises(InputError, match=cure):
            read(path, load("h200x4"))
