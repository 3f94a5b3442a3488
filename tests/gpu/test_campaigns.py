"""Short runs of the GPU campaigns, one torchrun each, on up to four GPUs, or by two ranks that share one.

Sized to take some seven minutes together on one GPU. Most of a campaign is compiling and waiting for deadlines, so
several run side by side on the same GPUs, which changes times and nothing else; what judges times is no part of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from campaigns.cases import OPERATORS

# The longest first: what starts last should not be what everything waits for.
CAMPAIGNS = {
    **{f"fp8 {one}": ["gpu_epilogues", "--forms", "fp8", "--sizes", "1", "--only", one] for one in OPERATORS},
    "callers": ["gpu_callers", "--trials", "16"],
    "exactness": ["gpu_exactness", "--shapes", "30", "--calls", "100", "--replays", "60", "--set", ""],
    "packed": [
        *("gpu_packed", "--shapes", "20", "--calls", "300", "--replays", "60"),
        *("--deadline", "4", "--matmul", "library", "early"),
    ],
    **{f"beside {one}": ["gpu_beside", "--trials", "48", "--only", one] for one in OPERATORS},
    "epilogues": ["gpu_epilogues", "--forms", "silu", "weights", "--sizes", "1", "--only", "push"],
    # Not among the first: torchruns that start together keep ranks apart for longer than this deadline.
    "faults": ["gpu_faults", "--deadline", "3", "--rounds", "2", "--absent", "3"],
    "norms": ["gpu_epilogues", "--forms", "norm", "--sizes", "1"],
    "authored": ["gpu_authored", "--calls", "2", "--trials", "20"],
    "tile_kernels": ["gpu_tile_kernels", "--calls", "6"],
    "experts": ["gpu_experts", "--cases", "3", "--calls", "6", "--replays", "20"],
    "attention": ["gpu_attention", "--cases", "5", "--calls", "6", "--replays", "20"],
    "models": ["gpu_models", "--steps", "5"],
    "sums": ["gpu_epilogues", "--forms", "silu", "--sizes", "1", "--only", "matmul_all_reduce two_shot"],
    "layers": ["gpu_torch", "--replays", "10", "--modes"],
    "reduce-overhead": ["gpu_torch", "--only", "reduce-overhead"],  # max-autotune is as long as all of these: by hand
    "hosts": ["gpu_hosts", "--calls", "6", "--replays", "10"],
    "batches": ["gpu_batches"],
    "drop_in": ["gpu_drop_in", "--replays", "20"],
}
# NCCL has no two ranks on a GPU. In gloo the collectives of DTensors on GPUs end in a segmentation fault (torch 2.11).
NEEDS_NCCL = {"models", *(f"beside {one}" for one in OPERATORS)}
ALONE = {  # one process each: odd sizes, and what the GPU's arithmetic is
    "odd_sizes": ["gpu_odd_sizes", "--repeats", "20"],
    "arithmetic": ["gpu_arithmetic"],
}
# Every tile shape, bit-equal at the sizes of mlp, by one process too. It waits for the GPU after each of more than ten
# thousand launches, and was not done in 240 s among the first of six lanes: it starts behind all others.
LAST = {"tiles": ["gpu_tile_choice", "--sets", "mlp"]}
# MEASURED: six lanes took 291 s on one H200 with 16 cores (benchmarks/results/blocks_of_one_rank), 439 s with the
# campaigns of 2026-11-29, 240 of them for what is among the LAST now (gpu_test.h200.2026-11-29). Four H200s with 64
# cores were done after 258 s with twelve, and not after 285 s with eight (gpu_test.h200x4.2026-11-28).
LANES = min(max(6, (os.cpu_count() or 1) // 4), 12)
Done = subprocess.CompletedProcess[str]


def run(*command: str) -> Done:
    return subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=240, check=False)


def succeed(done: Done) -> None:
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def campaigns() -> Iterator[dict[str, Future[Done]]]:
    """Every campaign, begun: as many at once as there are lanes."""
    gpus = torch.cuda.device_count()
    ranks = min(max(gpus, 2), 4)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m")
    starts = {**dict.fromkeys((*ALONE, *LAST), ()), **dict.fromkeys(CAMPAIGNS, torchrun)}
    with ThreadPoolExecutor(LANES) as lanes:
        yield {
            name: lanes.submit(run, *starts[name], f"campaigns.{module}", *options)
            for name, (module, *options) in {**ALONE, **CAMPAIGNS, **LAST}.items()
            if gpus > 1 or name not in NEEDS_NCCL
        }


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.gpu(1 + (name in NEEDS_NCCL))) for name in (*ALONE, *CAMPAIGNS, *LAST)],
)
def test_campaign(campaigns: dict[str, Future[Done]], name: str) -> None:
    succeed(campaigns[name].result())


@pytest.mark.gpu(1)
def test_whatever_a_thread_asks_of_the_driver_a_stream_wait_can_be_ended() -> None:
    succeed(run("campaigns.gpu_driver_waits", "--rescues", "own_context"))
