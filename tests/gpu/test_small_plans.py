"""Small plans of new kinds on one GPU that ranks share."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.gpu(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_small_plans(ranks: int) -> None:
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "tests.gpu.small_plans"]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
