"""The repairs of the interpreter, one by one, on kernels made to need them.

Run by test_interpreter.py in a process of its own: where triton has been imported for compiling it cannot interpret.
"""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from campaigns.exact.calls import Case  # noqa: E402
from campaigns.exact.exactness import make_data  # noqa: E402
from overweave.errors import InputError, PeerTimeout  # noqa: E402
from overweave.ir.problem import Problem  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.memory.host.workspace import HostSlot, HostWorkspace  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from overweave.runtime.host.host import run_on_host  # noqa: E402
from overweave.runtime.interpreted.numbers import matmul_fp32  # noqa: E402
from overweave.schedules.catalog import catalog  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

load("host interpreter")  # here, once, and not in every rank


@triton.jit
def dot_kernel(a, b, out, K: tl.constexpr):
    left, right = a.load([0, 0]), b.load([0, 0])
    total = tl.dot(left, right, tl.zeros((left.shape[0], right.shape[1]), tl.float32))
    rows, cols = tl.arange(0, left.shape[0]), tl.arange(0, right.shape[1])
    tl.store(out + rows[:, None] * right.shape[1] + cols[None, :], total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_against_fp64(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(32, 64, generator=generator).to(dtype), torch.randn(64, 32, generator=generator).to(dtype)
    out = torch.full((32, 32), torch.nan)
    dot_kernel[(1,)](TensorDescriptor.from_tensor(a, [32, 64]), TensorDescriptor.from_tensor(b, [64, 32]), out, 64)
    exact = a.double() @ b.double()
    assert (out - exact).norm() / exact.norm() < 1e-6


def test_a_product_starts_no_threads():
    """A rank that forks while such a thread ends inherits its lock: see `product`."""
    sides, tasks = [np.ones((64, 64), np.float32)] * 2, Path("/proc/self/task")
    counts: list[int] = []

    def multiply() -> None:
        counts.append(len(list(tasks.iterdir())))
        matmul_fp32(*sides)
        counts.append(len(list(tasks.iterdir())))

    thread = threading.Thread(target=multiply)
    thread.start()
    thread.join()
    assert counts[0] == counts[1]


@triton.jit
def relay_kernel(words, order, n):
    """Program i waits for program i + 1: impossible if programs run one after another, from the first on."""
    me = tl.program_id(0)
    if me < tl.num_programs(0) - 1:
        while tl.atomic_add(words + me + 1, 0, sem="acquire", scope="sys") == 0:
            pass
    place = tl.atomic_add(order + n, 1, sem="relaxed", scope="gpu")
    tl.store(order + place, me)
    tl.atomic_add(words + me, 1, sem="release", scope="sys")


def test_programs_may_wait_for_each_other():
    words, order = torch.zeros(9, dtype=torch.int32), torch.full((9,), -1, dtype=torch.int32)
    order[8] = 0
    relay_kernel[(8,)](words, order, 8)
    assert order[:8].tolist() == list(range(7, -1, -1))


@triton.jit
def meet_kernel(words, sizes, ME: tl.constexpr):
    tl.atomic_add(words + ME, 1, sem="release", scope="sys")
    while tl.atomic_add(words + 1 - ME, 0, sem="acquire", scope="sys") == 0:
        pass
    tl.store(sizes + ME, tl.num_programs(0))


def test_two_launches_overlap_and_keep_their_grid_sizes():
    words, sizes = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    other = threading.Thread(target=lambda: meet_kernel[(3,)](words, sizes, 1))
    other.start()
    meet_kernel[(2,)](words, sizes, 0)
    other.join()
    assert sizes.tolist() == [2, 3]


@triton.jit
def assembly_kernel(words, out):
    before = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, is_pure=False, pack=1)
    tl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)
    seen = tl.inline_asm_elementwise("ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [words], tl.int32, False, 1)
    after = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, is_pure=False, pack=1)
    tl.store(out, seen)
    tl.store(out + 1, (after - before > 0).to(tl.int32))


@triton.jit
def unknown_assembly_kernel(out):
    tl.store(out, tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [tl.load(out)], tl.int32, True, 1))


def test_inline_assembly():
    out = torch.zeros(2, dtype=torch.int32)
    assembly_kernel[(1,)](torch.full((1,), 41, dtype=torch.int32), out)
    assert out.tolist() == [41, 1]
    with pytest.raises(Exception, match=r"not emulated: popc\.b32"):
        unknown_assembly_kernel[(1,)](out)


@triton.jit
def loop_kernel(out, n):
    for index in range(0, n, 2):
        tl.store(out + index, index)


def test_scalars_are_indices_with_any_numpy():
    out = torch.zeros(5, dtype=torch.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # what numpy 2.4 refuses, earlier ones warn of
        loop_kernel[(1,)](out, 5)
    assert out.tolist() == [0, 0, 2, 0, 4]


def test_an_error_in_one_program_is_raised():
    with pytest.raises(Exception, match="not emulated"):
        unknown_assembly_kernel[(3,)](torch.zeros(1, dtype=torch.int32))


def add_many(address: int) -> None:
    for _ in range(5000):
        interpreter.atomic_add(address, 1)


def test_atomic_add_loses_nothing():
    word = np.zeros(1, np.int32)
    threads = [threading.Thread(target=add_many, args=(word.ctypes.data,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert word[0] == 20000


def refuse_unaligned() -> str:
    group = resolve(None)
    problem = Problem(operator="all_gather_matmul", m=4, n=8, k=9, world_size=group.world_size, dtype="bfloat16")
    plan = catalog.build("all_gather_matmul.push", problem, {})
    tensors = {"x": torch.ones(2, 9).bfloat16(), "w": torch.ones(9, 8).bfloat16()}
    with pytest.raises(InputError, match="Pad k to a multiple of 8") as caught:
        run_on_host(plan, group, tensors, {"y": torch.ones(4, 8).bfloat16()}, depth="interpreter")
    return type(caught.value).__name__


def test_rows_that_no_bulk_load_takes_are_refused():
    assert run_ranks(refuse_unaligned, 2) == ["InputError"] * 2


def late_once_begun(workspace: HostWorkspace, *given: Any) -> HostSlot:
    """A call begins, as its peers wait for, and then does nothing until they have given up."""
    slot = BEGIN(workspace, *given)
    threading.Event().wait(1.2)
    return slot


BEGIN = HostWorkspace.begin


def call_alone(operator: str, name: str) -> str:
    group = resolve(None)
    plan = Case(operator, 32, 16, 16, torch.float32, plan=name).built(2)
    data = make_data(plan.problem, group.rank, 0)
    output = torch.zeros(data.exact.shape)
    tensors = {"x": data.x, "w": data.w}
    run_on_host(plan, group, tensors, {"y": output}, "interpreter", timeout_s=5)
    begin = late_once_begun if group.rank == 0 else BEGIN
    with patch.object(HostWorkspace, "begin", begin), pytest.raises(PeerTimeout) as caught:
        run_on_host(plan, group, tensors, {"y": output}, "interpreter", timeout_s=0.4)
    assert output.isnan().all()
    assert threading.active_count() < 8  # the kernel's programs have ended
    return str(caught.value)


@pytest.mark.parametrize(
    ("operator", "plan", "late"),
    [
        ("all_gather_matmul", "push", "multiply.1-0."),
        ("matmul_reduce_scatter", "scatter sums=epilogue", "multiply.1.16 waits for arrived[0]"),
        ("matmul_reduce_scatter", "fused_ring", "multiply.1.16 waits for arrived[0]"),
        ("matmul_all_reduce", "one_shot_packed", "sum.1 waits for arrived[0]"),
        ("matmul_all_reduce", "two_shot_packed", "sum.1 waits for arrived[0]"),
        ("matmul_reduce_scatter", "scatter_packed", "sum.1 waits for arrived[0]"),
        ("all_gather_matmul", "gather_packed", "move.1 waits for arrived[0]"),
    ],
)
def test_kernels_that_wait_in_vain_are_ended(operator: str, plan: str, late: str):
    for text in run_ranks(call_alone, 2, operator, plan, timeout_s=20):
        assert f"rank 0 is late: {late}" in text
        assert "expected 1, seen 0" in text


def bits_of_lost_sums(plan: str, options: dict[str, int | str]) -> list[int]:
    """The bits of sums that are below 0 by less than half of the least fp16."""
    group = resolve(None)
    problem = Problem(operator="matmul_all_reduce", m=32, n=32, k=16, world_size=group.world_size, dtype="float16")
    x, w = torch.full((32, 16), -(2.0**-14)).half(), torch.zeros(16, 32).half()
    w[0] = 2.0**-14
    y = torch.full((32, 32), torch.nan).half()
    made = catalog.build(f"matmul_all_reduce.{plan}", problem, options)
    run_on_host(made, group, {"x": x, "w": w}, {"y": y}, depth="interpreter")
    return y.view(torch.int16).flatten().tolist()


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("two_shot", {"sums": "epilogue"}),
        ("ring_stored", {}),
    ],
)
def test_a_zero_has_the_same_sign_on_every_rank(plan: str, options: dict[str, int | str]):
    """Own sums and those of peers come to `y` by different ways: a move must leave the bits as they are."""
    first, *others = run_ranks(bits_of_lost_sums, 3, plan, {"block_m": 16, "block_n": 32} | options)
    assert others == [first] * 2
