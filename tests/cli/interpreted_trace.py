"""`overweave trace` of every schedule of the catalog, on emulated ranks, all from one process.

Run by test_trace.py in a process of its own: where triton has been imported for compiling it cannot interpret.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from overweave.cli.main import app  # noqa: E402
from overweave.ir.timeline.trace import from_chrome  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from overweave.schedules.catalog.catalog import names  # noqa: E402

load("host interpreter")  # here, once, and not in every rank


def cases() -> list[object]:
    """Every fourth schedule, and at night the others."""
    others = {name for at, name in enumerate(names()) if at % 4}
    return [pytest.param(name, marks=pytest.mark.nightly) if name in others else name for name in names()]


@pytest.mark.parametrize("name", cases())
def test_every_schedule_leaves_a_trace(tmp_path: Path, name: str):
    operator, method = name.split(".")
    words = [operator, "--shape", "128,128,64", "--world", "2", "--plan", method, "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["trace", *words, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"trace.{name}.json", f"trace.{name}.png"]
    measured, simulated = from_chrome((tmp_path / f"trace.{name}.json").read_bytes())
    assert (measured.name, measured.source, simulated.name, simulated.source) == (name, "measured", name, "simulated")
    busy = {span.kind for span in simulated.spans} - {"wait", "begin"}
    assert busy <= {span.kind for span in measured.spans}
    assert {span.rank for span in measured.spans} == {0, 1}
