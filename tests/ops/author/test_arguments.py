"""What calls of compiled kernels refuse: by type, with a cure, before anything is planned or written past its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.tools.tensor_descriptor import TensorDescriptor

import overweave as ow
from overweave.errors import InputError, MachineError
from overweave.ir.footprint import Dim, Operand
from overweave.ops.author.arguments import (
    check_local_tensors,
    check_options,
    check_plan_arguments,
    check_stores,
    check_tensors,
    unhashable_error,
)
from overweave.runtime.authored import tensor_of
from tests.islands import on_islands
from tests.ranks import run_ranks
from tests.source_tree import ROOT

MATMUL = f"{ROOT}/examples/kernels/matmul.py:matmul_kernel"
NUMBERS = {"M": 64, "N": 64, "K": 64, "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 2}
OUT = Operand("C", "c_ptr", (Dim(64, "M"), Dim(32, "N")))


def refusal(act: Callable[..., object], *arguments: Any, **named: Any) -> str:
    with pytest.raises(InputError) as caught:
        act(*arguments, **named)
    return str(caught.value)


@pytest.mark.parametrize("options", [{"num_warps": 3}, {"num_warps": "8"}, {"num_stages": 0}, {"maxnreg": True}])
def test_options_of_a_launch_are_numbers(options: dict[str, object]):
    assert next(iter(options)) in refusal(check_options, "kernel", options)
    check_options("kernel", {"num_warps": 8, "num_stages": 3, "maxnreg": 168})


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (torch.zeros(32, 32), "the [64, 32] of C: got [32, 32]"),  # half of it: tiles would write past its end
        (torch.zeros(64, 32).numpy(), "got ndarray"),
        (None, "got NoneType"),
    ],
)
def test_a_tensor_that_stays_has_the_elements_that_tiles_touch(value: object, found: str):
    check_local_tensors("kernel", [OUT], {"c_ptr": torch.zeros(64, 32)})
    check_local_tensors("kernel", [OUT], {"c_ptr": torch.zeros(64, 64)[:, ::2]})
    assert found in refusal(check_local_tensors, "kernel", [OUT], {"c_ptr": value})


def test_a_result_whose_rows_share_memory_is_refused_and_an_operand_is_not():
    expanded = {"c_ptr": torch.zeros(1, 32).expand(64, 32)}
    assert "c_ptr, stored to: elements share memory" in refusal(check_stores, "kernel", [], [OUT], expanded)
    check_stores("kernel", [], [OUT], {"c_ptr": torch.zeros(64, 64)[:, ::2]})
    check_local_tensors("kernel", [OUT], expanded)  # a kernel may load it by the strides that it is passed


def test_what_peers_read_is_not_stored_to_under_another_name():
    whole, shard = torch.zeros(64, 32), Operand("X", "x_ptr", OUT.dims)
    check_stores("kernel", [shard], [OUT], {"x_ptr": torch.zeros(32, 32), "c_ptr": whole})
    check_stores("kernel", [shard], [OUT], {"x_ptr": whole[32:], "c_ptr": whole[:32]})
    said = refusal(check_stores, "kernel", [shard], [OUT], {"x_ptr": whole[32:], "c_ptr": whole})
    assert "c_ptr, stored to: it shares memory with x_ptr, which peers read" in said


def test_an_array_of_numpy_is_no_tensor_even_if_it_lies_in_one():
    array = torch.zeros(4).numpy()
    assert isinstance(array.base, torch.Tensor)
    assert tensor_of(array) is None
    assert "b_ptr: got ndarray" in str(unhashable_error("kernel", {"a_ptr": torch.zeros(2), "b_ptr": np.zeros(3)}))


def test_tensors_of_a_call_lie_on_one_device_that_runs_kernels():
    here, nowhere = torch.zeros(2), torch.zeros(2, device="meta")
    assert "b: it is on meta" in refusal(check_tensors, "kernel", {"a": here, "n": 3, "b": nowhere})
    assert "a: it is on meta" in refusal(check_tensors, "kernel", {"a": nowhere, "b": nowhere})
    described = TensorDescriptor.from_tensor(torch.zeros(16, 16), [16, 16])
    described.base = torch.zeros(16, 16, device="meta")
    assert "b: it is on meta" in refusal(check_tensors, "kernel", {"a": here, "b": described})
    check_tensors("kernel", {"a": here, "n": 3, "b": here})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "world_size", "dtype", "found"),
    [
        ([64], 2, "bfloat16", "numbers: got list"),
        ({1: 64}, 2, "bfloat16", "numbers: got dict"),
        (NUMBERS | {"M": "64"}, 2, "bfloat16", "M: got str"),
        (NUMBERS | {"M": 64.0}, 2, "bfloat16", "M: got float"),
        (NUMBERS | {"BLOCKM": 16}, 2, "bfloat16", "BLOCKM: it has no such parameter"),
        (NUMBERS, 0, "bfloat16", "world_size 0"),
        (NUMBERS, "2", "bfloat16", "world_size 2"),
        (NUMBERS, 2, "bf16", "bfloat16, float16, float32, as a string"),
        (NUMBERS, 2, torch.bfloat16, "dtype torch.bfloat16"),
    ],
)
def test_what_cannot_be_planned_on_paper(numbers: Any, world_size: Any, dtype: Any, found: str):
    source = ow.compile(MATMUL, "all_gather.push").kernel.source
    check_plan_arguments(source, NUMBERS, 2, "bfloat16")
    assert found in refusal(check_plan_arguments, source, numbers, world_size, dtype)
    assert found in refusal(ow.compile(MATMUL, "all_gather.push").plan, numbers, world_size, dtype)
    assert found in refusal(ow.compile_auto(MATMUL, "all_gather.auto").rank, numbers, world_size, dtype)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"configs": {"BLOCK_M": 16}}, "got dict"),
        ({"configs": [16]}, "a list of mappings"),
        ({"tile_us": "x"}, "tile_us: got 'x'"),
        ({"tile_us": -1.0}, "microseconds above 0"),
        ({"tile_us": float("nan")}, "microseconds above 0"),
    ],
)
def test_what_cannot_be_chosen_among(options: Any, found: str):
    assert found in refusal(ow.compile_auto, MATMUL, "all_gather.auto", **options)


@pytest.mark.parametrize("fuse", [ow.compile, ow.compile_auto])
def test_some_tensor_is_exchanged(fuse: Callable[..., object]):
    assert "no tensor has a schedule" in refusal(fuse, MATMUL, {})


def test_a_fused_kernel_has_no_grid():
    fused = ow.compile(MATMUL, "all_gather.push")
    assert "without a grid" in refusal(lambda: fused[8,])


@pytest.mark.parametrize(
    ("kernel", "schedule", "found"),
    [
        ("no\0file.py:kernel", "all_gather.push", "null byte"),
        (MATMUL, {3: "all_gather.push"}, "Name a tensor"),
        (MATMUL, {None: "all_gather.push"}, "Name a tensor"),
        (MATMUL, ["all_gather.push"], "a list"),
    ],
)
def test_what_is_no_kernel_or_schedule(kernel: Any, schedule: Any, found: str):
    assert found in refusal(ow.compile, kernel, schedule)


def call_with_what_lies_elsewhere() -> list[str]:
    fused = ow.compile(MATMUL, "all_gather.push pieces=1")
    strides = dict.fromkeys(("stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", "stride_cn"), 1)
    tensors = {name: torch.zeros(64, 64) for name in ("a_ptr", "b_ptr", "c_ptr")}

    def call(a: torch.Tensor) -> None:
        fused(**(tensors | {"a_ptr": a}), **NUMBERS, **strides)

    a = tensors["a_ptr"]
    fake = FakeTensorMode().from_tensor(a)
    return [
        refusal(act) for act in (lambda: call(fake), lambda: call(a.to_sparse()), lambda: torch.vmap(call)(a[None]))
    ]


@pytest.mark.slow
def test_tensors_that_lie_elsewhere_are_refused():
    fake, sparse, wrapped = run_ranks(call_with_what_lies_elsewhere, 1)[0]
    assert "matmul_kernel: a_ptr: got FakeTensor" in fake
    assert "a_ptr: its layout is torch.sparse_coo" in sparse
    assert "a_ptr: it has no memory of its own" in wrapped


def call_over_islands(schedule: str) -> str:
    """What a kernel whose rows of A a schedule gathers raises in a group of two islands; "" if it runs."""
    fused = ow.compile(MATMUL, schedule)
    strides = {"stride_am": 64, "stride_ak": 1, "stride_bk": 64, "stride_bn": 1, "stride_cm": 64, "stride_cn": 1}
    tensors = {"a_ptr": torch.ones(32, 64), "b_ptr": torch.ones(64, 64), "c_ptr": torch.zeros(64, 64)}
    try:
        fused(**tensors, **NUMBERS, **strides)
    except MachineError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_kernel_whose_rows_reach_other_islands_is_refused_by_its_name():
    for found in run_ranks(on_islands, 2, "ab", call_over_islands, "all_gather.push"):
        assert "run matmul_kernel of" in found
        assert "rank 0 on a and rank 1 on b do not reach each other's memory" in found
    by_library = run_ranks(on_islands, 2, "ab", call_over_islands, "all_gather.collective")
    assert all("reach" not in each for each in by_library)  # the pool has no interpreter to run it with
