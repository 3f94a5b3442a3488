"""What is read of a result file: the middle run, the plan that was measured, and how sure the numbers are."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from campaigns.choices.sim_accuracy import read
from overweave.errors import InputError
from overweave.hardware.machine import load

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


def test_what_is_no_result_file_is_refused(tmp_path: Path):
    broken = tmp_path / "b.json"
    broken.write_text('{"runs": [], "middle": 0}')
    on_cpu = written(tmp_path / "c.json", {"matmul": (1.0, 1.0)}, device="cpu")
    for path, cure in ((broken, "bench --json"), (tmp_path / "absent.json", "bench --json"), (on_cpu, "H200")):
        with pytest.raises(InputError, match=cure):
            read(path, load("h200x4"))
