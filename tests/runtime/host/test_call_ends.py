"""A call leaves nothing behind that only the garbage collector would find: a process group would outlive its end."""

from __future__ import annotations

import gc

import pytest
import torch

import overweave as ow
from overweave.runtime.host.emulate import HostCall
from overweave.runtime.host.processes import run_ranks

operators = {"all_gather_matmul": ow.all_gather_matmul, "matmul_all_reduce": ow.matmul_all_reduce}


def left_behind(name: str, plan: str) -> int:
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    operators[name](torch.ones(8, 16), torch.ones(16, 8), plan=plan)
    gc.collect()
    return sum(isinstance(one, HostCall) for one in gc.garbage)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    [("all_gather_matmul", "push"), ("all_gather_matmul", "sequential"), ("matmul_all_reduce", "two_shot")],
)
def test_a_call_ends_with_its_last_reference(name, plan):
    assert run_ranks(left_behind, 2, name, plan) == [0, 0]
