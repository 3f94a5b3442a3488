"""The toys on three emulated ranks whose kernels are interpreted: python -m tests.extending.woven_toys"""

from __future__ import annotations

import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

import overweave as ow  # noqa: E402
from overweave.ir.problem import Problem  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.ops.trial import case_of, try_case  # noqa: E402
from overweave.schedules.methods.registry import register  # noqa: E402
from tests.extending import toy_method, toy_operator, toy_schedule  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.source_tree import ROOT  # noqa: E402

M, N, K = 80, 24, 32
SIZES = (M, N, K, K, 1, N, 1, N, 1)
BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 4}


def is_exact(schedule: str) -> bool:
    """Whether an author's kernel over the registered method computes the product of all ranks' rows."""
    register(toy_schedule.METHOD)
    register(toy_method.METHOD)
    group, a = resolve(None), torch.arange(M * K, dtype=torch.float32).reshape(M, K) % 7
    b, c = torch.arange(K * N, dtype=torch.float32).reshape(K, N) % 5, torch.full((M, N), torch.nan)
    fused = ow.compile(f"{ROOT}/examples/kernels/matmul.py:matmul_kernel", schedule, check=False)
    fused(a.chunk(group.world_size)[group.rank], b, c, *SIZES, **BLOCKS)
    return torch.equal(c, a @ b)


def is_right(method: str) -> bool:
    """Whether a method of the toy operator is, by tiles of a kernel."""
    toy_operator.add()
    group, name = resolve(None), toy_operator.OPERATOR.name
    problem = Problem(operator=name, m=37, n=24, k=16, world_size=group.world_size, dtype="bfloat16")
    trial = try_case(case_of(f"{name}.{method}", problem, "cpu", {}), group)
    return trial is None or trial.is_right


def main() -> None:
    for name in (toy_schedule.METHOD.name, toy_method.METHOD.name):
        print(name, *run_ranks(is_exact, 3, f"all_gather.{name}"))
    print("push", *run_ranks(is_right, 3, "push"))


if __name__ == "__main__":
    main()
