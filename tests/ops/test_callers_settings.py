"""A caller's settings change nothing: operators compute in the dtypes that they are given, in every plan."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
import torch.distributed as dist

from campaigns.host.host_cases import Case, call_of
from campaigns.host.host_path import SIZES, ready
from tests.ops.calls import run, small_call
from tests.ranks import run_ranks
from tests.source_tree import modules, nodes

PLANS = {
    "all_gather_matmul": ("sequential", "per_shard", "push"),
    "matmul_reduce_scatter": ("sequential", "scatter", "scatter sums=epilogue"),
    "matmul_all_reduce": ("sequential", "two_shot", "one_shot_packed"),
}
MAKERS = {"zeros", "ones", "empty", "full", "rand", "randn", "empty_strided"}


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def setting(name: str) -> AbstractContextManager[object]:
    if name == "default device":
        return torch.device("meta")
    return default_dtype() if name == "default dtype" else torch.inference_mode()


def differing(operator: str, name: str) -> list[str]:
    torch.manual_seed(dist.get_rank())
    told = []
    for plan in PLANS[operator]:
        call = small_call(operator, 32, plan=plan)
        rows = 32 // dist.get_world_size() if operator == "all_gather_matmul" else 32
        x, w = torch.randn(rows, call.k), torch.randn(call.k, call.n)
        with setting(name):
            (within,) = run(call, x, w)
        (plain,) = run(call, x, w)
        if (plain.dtype, plain.device) != (within.dtype, within.device) or not torch.equal(plain, within):
            told.append(plan)
    return told


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default dtype", "default device", "inference mode"])
@pytest.mark.parametrize("operator", PLANS)
def test_bits_are_those_without_it(operator: str, name: str):
    assert run_ranks(differing, 2, operator, name) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["per_shard", "gather_packed"])
def test_what_a_first_call_in_inference_mode_makes_serves_later_calls(plan: str):
    """On a GPU, where it is kept: its own shard is copied into the workspace by every call."""
    with ready() as group, torch.no_grad():
        call = call_of(Case("all_gather_matmul", plan), group, SIZES)
        with torch.inference_mode():
            call()
        call()


@pytest.mark.slow
def test_new_tensors_name_their_dtype():
    found = []
    for name, path in modules().items():
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS:
                if ast.unparse(node.func.value) == "torch" and not any(word.arg == "dtype" for word in node.keywords):
                    found.append(f"{name}:{node.lineno}")
    assert not found
