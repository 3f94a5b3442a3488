"""First calls on GPUs leave the process as it was (tests/effects has what needs none)."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.gpu(1)
def test_first_calls_change_nothing_of_the_process() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, "-m", "tests.effects.no_side_effects", "gpu_calls"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout[-4000:] + done.stderr[-4000:]
