"""What a compiled kernel keeps, and for how long."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from campaigns.lint.authored_cases import AUTHORS, KERNELS
from overweave.compiler.emit.emit import emit
from overweave.compiler.emit.fuse import fusion_options
from overweave.errors import InputError
from overweave.ops.author.compile import _argument_key, compile
from tests.source_tree import ROOT

KEEPS_A_GROUP = """
import atexit, weakref

def at_exit():
    print("group", "lives" if alive() else "is gone")

atexit.register(at_exit)  # runs behind the hooks of what is imported below

from overweave.ops.author.compile import compile
from overweave.ops.call.prepared import CALLS

class Group:
    pass

fused, group = compile("examples/kernels/matmul.py:matmul_kernel", "all_gather.push"), Group()
CALLS[group] = {"a call": [group]}  # as a call holds its group
alive = weakref.ref(group)
del group
"""


@pytest.mark.slow
def test_no_process_group_outlives_the_interpreter():
    command = [sys.executable, "-c", KEEPS_A_GROUP]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    assert found.stdout.strip() == "group is gone"


def test_another_descriptor_of_the_same_tensor_is_another_call():
    base = torch.zeros(64, 64)
    whole = TensorDescriptor.from_tensor(base, [16, 16])
    others = [
        TensorDescriptor(base, [48, 64], [64, 1], [16, 16]),
        TensorDescriptor(base, [64, 16], [64, 1], [16, 16]),
        TensorDescriptor(base, [32, 64], [128, 1], [16, 16]),
        TensorDescriptor.from_tensor(base, [16, 32]),
        TensorDescriptor.from_tensor(base, [16, 16], "nan"),
    ]
    signatures = {_argument_key(one) for one in (whole, *others)}
    assert len(signatures) == 1 + len(others)
    assert _argument_key(whole) == _argument_key(TensorDescriptor.from_tensor(torch.ones(64, 64), [16, 16]))


def test_tile_group_says_how_many_blocks_of_rows_run_together():
    fused = compile(f"{ROOT}/examples/kernels/matmul.py:matmul_kernel", "all_gather.push pieces=1")
    strides = dict.fromkeys(("stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", "stride_cn"), 1)
    numbers = {"M": 128, "N": 32, "K": 16, "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 8, **strides}

    def order(*group: int) -> list[tuple[int, int]]:
        """(row, column) of the blocks of rank 0's own shard: four rows of two."""
        (table,) = fused.plan(numbers, 2, "float32", 0, *group).tile_orders
        return [divmod(row.row, 2) for row in table.rows[:8]]

    assert order(1) == [(row, col) for row in range(4) for col in range(2)]
    assert order(2)[:4] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert order() == order(8) == [(row, col) for col in range(2) for row in range(4)]
    for wrong in (0, "4", True):
        with pytest.raises(InputError, match="tile_group"):
            order(wrong)  # type: ignore[arg-type]


NUMBERS = {
    "matmul": {"M": 512, "N": 256, "K": 512, "stride_am": 512, "stride_bk": 256, "stride_cm": 256},
    "gate_up": {"M": 512, "N": 256, "K": 512},
    "batched": {"Z": 4, "M": 128, "N": 128, "K": 64},
    "attention": {"Q": 128, "S": 512, "H": 2, "q_start": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("matmul", {"A": "all_gather.push"}),
        ("matmul", {"B": "all_gather.push"}),  # every tile reads rows of all ranks
        ("matmul", {"B": "all_gather.push mover=tiles", "C": "reduce_scatter.scatter"}),
        ("gate_up", {"G": "all_gather.push", "X": "all_gather.pull"}),
        ("batched", {"B": "all_gather.ring"}),
        ("attention", {"K": "all_gather.push", "V": "all_gather.push"}),
    ],
)
def test_the_text_that_is_written_is_the_one_that_a_call_runs(file: str, wanted: dict[str, str]):
    author = AUTHORS[file]
    fused = compile(f"{KERNELS / file}.py:{author.name}", wanted)
    constants = {name: value for name, value in author.constants.items() if type(value) is int}
    numbers = {**author.numbers, **constants, **NUMBERS[file]}
    for world_size in (2, 4):
        plan = fused.plan(numbers, world_size)
        run = emit(fused.kernel, fusion_options(plan, fused.kernel.space(numbers), fused.schedules))
        assert run == fused.source()
