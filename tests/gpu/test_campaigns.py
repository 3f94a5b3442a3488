"""Short runs of the GPU campaigns, one torchrun each, on as many GPUs as are here (at least two, at most four).

Sized to take less than five minutes together on two GPUs; most of that is compiling and waiting for deadlines.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

CAMPAIGNS = {
    "exactness": ["gpu_exactness", "--shapes", "30", "--calls", "100", "--replays", "60", "--set", ""],
    "faults": ["gpu_faults", "--deadline", "3", "--rounds", "2", "--absent", "3"],
    "beside": ["gpu_beside", "--trials", "48"],
    "epilogues": ["gpu_epilogues", "--activations", "silu", "--sizes", "1", "--only", "push"],
    "norms": ["gpu_norms", "--sizes", "2"],
    "tile_kernels": ["gpu_tile_kernels", "--calls", "6"],
    "authored": ["gpu_authored", "--calls", "2", "--trials", "30"],
    "packed": [
        *("gpu_packed", "--shapes", "20", "--calls", "300", "--replays", "60"),
        *("--deadline", "4", "--no-latency"),
    ],
    "fp8": ["gpu_fp8", "--no-times", "--sizes", "1"],
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
    module, *options = CAMPAIGNS[name]
    command += [f"campaigns.{module}", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
