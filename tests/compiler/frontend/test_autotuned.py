"""The constants that a kernel's autotuner sets, which a call must name: their defaults do not hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from overweave.compiler.emit.fuse import kernel_of
from tests.compiler.annotated import SCALE, changed

ALL = {"BLOCK_M", "BLOCK_N"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configs", "constants"),
    [
        ("[triton.Config({'BLOCK_M': 16})]", {"BLOCK_M"}),
        ("[triton.Config({'BLOCK_M': size}) for size in (16, 32)]", {"BLOCK_M"}),
        ("MORE", {"BLOCK_N"}),
        ("[triton.Config({'BLOCK_M': 16}), *MORE]", ALL),
        ("[triton.Config({'BLOCK_M': 16})] + MORE", ALL),
        ("[triton.Config({**BASE, 'BLOCK_M': 16})]", ALL),
        ("more()", ALL),
    ],
)
def test_configs_that_cannot_be_read_set_all(tmp_path: Path, configs: str, constants: set[str]):
    top = "MORE = [triton.Config({'BLOCK_N': 64})]\nBASE = {'BLOCK_N': 16}\n\n\n"
    jitted = f"{top}@triton.autotune(configs={configs}, key=['M'])\n@triton.jit\ndef scale"
    (tmp_path / "kernel.py").write_text(changed(SCALE, ("@triton.jit\ndef scale", jitted)))
    assert kernel_of(tmp_path / "kernel.py", "scale").source.autotuned == constants
