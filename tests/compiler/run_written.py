"""Runs a file that `overweave compile` wrote, on emulated ranks: python tests/compiler/run_written.py OUT.py

The process knows of the author's file only what the schedule is made from: the kernel that runs is OUT.py's.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from overweave.memory.group import resolve  # noqa: E402
from overweave.ops.author.compile import compile  # noqa: E402
from overweave.runtime.authored import AuthoredKernel, buffers_of_tensors  # noqa: E402
from overweave.runtime.host.authored import HostAuthoredRun  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

MATMUL = Path(__file__).parents[2] / "examples" / "kernels" / "matmul.py"
SCHEDULE = {"A": "all_gather.push pieces=2"}
RANKS, M, N, K = 3, 96, 24, 32
BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 4}
STRIDES = {"stride_am": K, "stride_ak": 1, "stride_bk": N, "stride_bn": 1, "stride_cm": N, "stride_cn": 1}
NUMBERS = {"M": M, "N": N, "K": K, **STRIDES, **BLOCKS}


def written(path: str) -> Any:
    """The kernel of the file, imported as any module is."""
    spec = spec_from_file_location("written", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.matmul_kernel


def call(path: str) -> float:
    """This rank's part: the written kernel through the launcher that runs compiled kernels. How far it is off."""
    group, fused = resolve(None), compile(f"{MATMUL}:matmul_kernel", SCHEDULE)
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-3, 4, shape, generator=generator).float() for shape in ((M, K), (K, N)))
    own, c = a.chunk(RANKS)[group.rank].contiguous(), torch.full((M, N), torch.nan)
    space, plan = fused.kernel.space(NUMBERS), fused.plan(NUMBERS, RANKS, "float32", group.rank)
    places = buffers_of_tensors(plan, space, SCHEDULE)
    kernel = AuthoredKernel(
        written(path), space, places, dual_source="a_ptr", peer_store=None, is_persistent=False, options={}, shapes={}
    )
    given = {"a_ptr": own, "b_ptr": b, "c_ptr": c, **NUMBERS}
    HostAuthoredRun.bind(plan, group, kernel, given)(given)
    return float((c - a @ b).abs().max())


def main() -> None:
    print(f"off by {max(run_ranks(call, RANKS, sys.argv[1]))} on {RANKS} ranks")


if __name__ == "__main__":
    main()
