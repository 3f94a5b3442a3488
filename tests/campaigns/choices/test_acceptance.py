"""What result files are held to, on made-up files: each promise holds of a good row, and each can be broken."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from campaigns.choices.acceptance import ELSEWHERE, main, read, verdicts
from campaigns.verdict import Verdict

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
# Microseconds; every promise that a row of its kind is held to holds of these.
GOOD = {"matmul": 300.0, "communication": 150.0, "copies": 120.0, "ceiling": 306.0, "sequential": 450.0,
        "torch_fused": 380.0, "overweave": 312.0}  # fmt: skip
FEW = {"matmul": 20.0, "communication": 15.0, "sequential": 36.0, "torch_fused": 30.0, "overweave": 24.0}
BOUND = {"matmul": 100.0, "communication": 200.0, "copies": 180.0, "ceiling": 190.0, "sequential": 300.0,
         "torch_fused": 260.0, "overweave": 200.0}  # fmt: skip


def case(name: str, m: int, times: dict[str, float], host_us: float = 20.0, width: float = 0.005) -> dict[str, object]:
    """A case with the intervals of its ratios `width` to either side. Up to 512 rows it was replayed."""
    rows = []
    hideable_us = times["sequential"] - times["matmul"]
    for method, us in times.items():
        is_ours = method == "overweave"
        ratios = {base: times[base] / us for base in ("sequential", "torch_fused") if is_ours}
        measures = {"exposed_us": us - times["matmul"], "overlap_efficiency": 1 - (us - times["matmul"]) / hideable_us,
                    "overlap_ratio": None, "ceiling_fraction": None}  # fmt: skip
        rows.append({
            "name": method, "label": method, "median_us": us, "p90_us": us, "host_us": host_us,
            "speedups": {k: {"value": v, "low": v - width, "high": v + width} for k, v in ratios.items()},
            "measures": measures if is_ours else None,
        })  # fmt: skip
    shape = {"name": name, "m": m, "n": 4096, "k": 4096}
    return {"case": shape, "methods": rows, "left_out": {}, "is_replayed": m <= 512}


def written(
    path: Path, operator: str, *cases: dict[str, object], ranks: int = 4, rounds: int = 30, runs: int = 3,
    dtype: str = "bf16",
) -> Path:  # fmt: skip
    run = {"operator": operator, "world_size": ranks, "device": "cuda", "dtype": dtype, "effort": {"rounds": rounds},
           "date": "", "versions": {}, "devices": ["a GPU"], "cases": cases}  # fmt: skip
    path.write_bytes(msgspec.json.encode({"command": "", "runs": [run] * runs, "middle": 0, "spread": {}}))
    return path


def broken(found: list[Verdict]) -> list[str]:
    return [verdict.promise.split(" W=")[1] for verdict in found if verdict.holds is False]


def test_good_rows_keep_every_promise(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    large, layer = case("MLP-1", 8192, GOOD), case("Llama-3-8B.o.m=4096", 4096, GOOD)
    files = [
        written(tmp_path / "a.json", GATHER, large, layer, case("b", 2048, GOOD), case("c", 8192, BOUND)),
        written(tmp_path / "b.json", SCATTER, large, case("c", 8192, BOUND)),
        written(tmp_path / "c.json", REDUCE, layer, case("Llama-3-70B.down.m=16", 16, FEW, host_us=90.0)),
    ]
    assert main(list(map(str, files))) == 0
    lines = capsys.readouterr().out.splitlines()
    judged = [line for line in lines if not line.startswith("else")]
    assert all(line.startswith("PASS") for line in judged)
    assert len(judged) == 11 + 8 + 6
    assert len(lines) - len(judged) == len(ELSEWHERE)


@pytest.mark.parametrize(
    ("operator", "name", "m", "changed", "lost"),
    [
        (GATHER, "MLP-1", 8192, {"overweave": 325.0}, ["times the ceiling", "efficiency"]),
        (GATHER, "large", 8192, {"overweave": 320.0}, ["times the ceiling"]),
        (GATHER, "small", 2048, {"overweave": 319.0}, ["us beyond the ceiling"]),
        (GATHER, "MLP-1", 8192, {"torch_fused": 340.0}, ["torch's fused"]),
        (GATHER, "MLP-1", 8192, {"sequential": 404.0}, ["NCCL"]),
        (GATHER, "large", 8192, {"matmul": 110.0, "copies": 120.0}, ["link is the bound"]),
        (SCATTER, "MLP-1", 8192, {"overweave": 330.0}, ["efficiency"]),
        (SCATTER, "large", 8192, {"torch_fused": 340.0}, ["torch's fused"]),
        (SCATTER, "large", 8192, {"overweave": 460.0}, ["never slower", "torch's fused"]),
        (REDUCE, "Llama-3-70B.o.m=1024", 1024, {"sequential": 400.0}, ["1,024 to 8,192 tokens"]),
        (REDUCE, "Llama-3-70B.o.m=256", 256, {"torch_fused": 340.0}, ["1 to 256 tokens"]),
    ],
)
def test_each_promise_can_be_broken(
    operator: str, name: str, m: int, changed: dict[str, float], lost: list[str], tmp_path: Path
):
    found = broken(verdicts(read(written(tmp_path / "a.json", operator, case(name, m, GOOD | changed)))))
    assert len(found) == len(lost), found
    assert all(word in line for word, line in zip(lost, found, strict=True)), found


@pytest.mark.slow
def test_tables_hold_the_model_against_what_was_tuned(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    table = Path(__file__).parents[3] / "overweave" / "tuner" / "tables" / "h200x2.json"
    known = msgspec.json.decode(table.read_bytes())
    for name, entries in (("some", known["entries"][::8]), ("empty", [])):
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(known | {"entries": entries}))
    assert main([str(tmp_path / "some.json")]) == 0
    assert "PASS  some.json W=2: the model's choice, of the tuned speed: mean 0.9" in capsys.readouterr().out
    assert main([str(tmp_path / "empty.json")]) == 1


def test_files_of_the_repository_are_read(capsys: pytest.CaptureFixture[str]):
    results = Path(__file__).parents[3] / "benchmarks" / "results"
    assert main([str(path) for path in sorted(results.glob("tuned.*2026-11-20.json"))]) in (0, 1)
    assert "all_gather_matmul W=4: never slower: 0 of 6 rows lose" in capsys.readouterr().out
