"""What a table of `overweave bench` shows."""

from __future__ import annotations

from overweave.cli.bench_table import print_runs
from overweave.tuner.measure.bench import BenchRun, CaseRows, Measures, MethodRow, spread
from overweave.tuner.measure.timer import Effort, Ratio
from overweave.tuner.space.shapes import ShapeCase

RATIO = Ratio(value=1.05, low=1.04, high=1.06)
ROW = MethodRow(
    name="overweave",
    label="overweave",
    median_us=12345.6,
    p90_us=12345.7,
    host_us=12345.8,
    speedups={"sequential": RATIO, "torch_fused": RATIO},
    measures=Measures(exposed_us=12345.9, overlap_efficiency=-1.25, overlap_ratio=-1.75, ceiling_fraction=0.85),
    plan="scatter copy_programs=32 mover=copy_kernel own_pieces=1 pieces=1",
)
RUN = BenchRun(
    operator="matmul_reduce_scatter",
    world_size=4,
    device="cuda",
    dtype="bf16",
    effort=Effort(),
    date="",
    versions={},
    devices=("NVIDIA H200",),
    cases=(CaseRows(case=ShapeCase("8B-o-2048", 2048, 4096, 4096), methods=(ROW,), left_out={}),),
)


def test_the_name_of_a_plan_costs_no_digit_of_a_number(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    print_runs((RUN,), 0, spread((RUN,), 0))
    shown = capsys.readouterr().out
    assert "…" not in shown
    for number in ("12345.6", "12345.7", "12345.8", "12345.9", "1.050 (1.040-1.060)", "-1.25", "-1.75", "0.85"):
        assert number in shown
