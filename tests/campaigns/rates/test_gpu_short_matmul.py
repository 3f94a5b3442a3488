"""How the parts of a short launch are read, and who multiplies which sizes; no GPU is needed for either."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from campaigns.rates.odd_sizes import SIZES, library_why
from campaigns.rates.scaled_alone import scaled_plan
from campaigns.rates.short_parts import Parts, mean_of, parts_of, save_picture, table
from overweave.memory.device.signals import BEGUN, CLAIMED, MULTIPLIED, PARTED, READY, STORED, TRACE_COLUMNS

COLUMNS = [one.value for one in (BEGUN, PARTED, CLAIMED, READY, MULTIPLIED, STORED)]


def test_parts_are_of_the_tile_that_is_stored_last_and_add_up():
    trace = torch.zeros(3, TRACE_COLUMNS.value, dtype=torch.int64)
    trace[0, COLUMNS] = torch.tensor([1100, 1150, 1300, 1400, 2000, 2600])
    trace[1, COLUMNS] = torch.tensor([1050, 1100, 1250, 1300, 1500, 2599])
    trace[2, COLUMNS] = torch.tensor(
        [900, 950, 2300, 2400, 2500, 2700]
    )  # a program's second: it began in a call before
    found = parts_of(trace, 1000, 3000)
    assert found == Parts(0.1, 0.05, 0.15, 0.1, 0.6, 0.6, 0.4)
    assert found.total == pytest.approx(2.0)
    assert mean_of([found, Parts(*(3 * us for us in found))]) == pytest.approx([2 * us for us in found])


def test_a_launch_is_a_line_and_a_bar(tmp_path: Path):
    found = {"64 x 64": Parts(1, 2, 3, 4, 5, 6, 7)}
    head, line = table(found, {"64 x 64": {"library": 7.5}})
    assert head.split()[-2:] == ["end", "total"]
    assert line.endswith("28.00   library 7.50")
    save_picture(tmp_path / "parts.png", found, {"64 x 64": {"library": 7.5}})
    assert (tmp_path / "parts.png").read_bytes().startswith(b"\x89PNG")


def test_sizes_whose_rows_start_anywhere_are_the_librarys():
    whys = {size: library_why(*size) for size in SIZES}
    assert "n=2754" in whys[512, 2754, 4096]
    assert "nothing" in whys[64, 64, 0]
    assert whys[127, 131, 137]
    assert not whys[300, 24, 4104] + whys[7, 8, 64]


def test_fp8_is_multiplied_in_tiles_of_fp8():
    assert scaled_plan(512, 1536, 4096, 132).realization.matmul.block_k == 128
