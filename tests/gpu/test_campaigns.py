"""Short runs of the GPU campaigns, one torchrun each, on as many GPUs as are here (at least two)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

CAMPAIGNS = {
    "packed": ["campaigns.gpu_packed", "--calls", "500", "--no-latency"],
    "exactness": ["campaigns.gpu_exactness", "--shapes", "60", "--calls", "200", "--replays", "200"],
    "faults": ["campaigns.gpu_faults", "--deadline", "3", "--rounds", "3"],
    "beside": ["campaigns.gpu_beside", "--trials", "48"],
    "tile_kernels": ["campaigns.gpu_tile_kernels"],
    "epilogues": ["campaigns.gpu_epilogues"],
    "norms": ["campaigns.gpu_norms"],
    "fp8": ["campaigns.gpu_fp8"],
}


@pytest.mark.gpu(1)
def test_every_tile_shape_is_bit_equal_at_the_sizes_of_mlp() -> None:
    command = [sys.executable, "-m", "campaigns.gpu_tile_choice", "--sets", "mlp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_campaign(name: str) -> None:
    ranks = min(torch.cuda.device_count(), 4)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    done = subprocess.run(command + CAMPAIGNS[name], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
