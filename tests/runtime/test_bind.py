"""Every kind of plan bound as on a GPU, without one: kernels compile with the very arguments that a launch passes them.

A call is then made, with a driver that only writes down what it is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from overweave.ir.epilogue import Epilogue, Norm, Z
from overweave.ir.plan import Plan, Problem
from overweave.ir.schedule import INPUT, OUTPUT
from overweave.memory.layout import lay_out
from overweave.runtime import launch
from overweave.runtime.order import launch_order
from overweave.schedules.catalog import build
from tests.runtime.without_gpu import CALLER, HostSlot, launched, workspace

__all__ = ["launched"]  # a fixture

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


class Case(NamedTuple):
    """A plan, and what is special about its problem."""

    operator: str
    plan: str
    special: Mapping[str, Any] = MappingProxyType({})

    def __str__(self) -> str:
        return " ".join((self.operator, self.plan, *(f"{name}={value}" for name, value in self.special.items())))

    def build(self) -> Plan:
        name, *pairs = self.plan.split()
        options = dict(pair.split("=") for pair in pairs)
        size = {"m": 512, "n": 768, "k": 256, "dtype": "bfloat16"} | dict(self.special)
        problem = Problem(operator=self.operator, world_size=2, **size)
        return build(f"{self.operator}.{name}", problem, options, rank=0)


FP8 = {"dtype": "float8_e4m3fn", "out_dtype": "bfloat16", "b_is_transposed": True}
SPECIAL: tuple[dict[str, Any], ...] = (
    {},
    {"b_is_transposed": True, "epilogue": Epilogue(bias=True, activation="silu", residual=True)},
    {"epilogue": Epilogue(activation="silu", gate=True)},
    {"columns": (512, 128, 128)},
    FP8 | {"epilogue": Epilogue(scaling="rows")},
    FP8 | {"epilogue": Epilogue(scaling="tensor")},
)
CASES = (
    *(Case(GATHER, f"push kernel={kernel}", special) for kernel in ("hopper", "portable") for special in SPECIAL),
    Case(GATHER, "pull kernel=hopper pieces=2"),
    Case(GATHER, "push mover=copy_kernel kernel=portable"),
    Case(GATHER, "gather", {"columns": (512, 256)}),
    Case(SCATTER, "scatter kernel=hopper"),
    Case(SCATTER, "scatter sums=epilogue kernel=hopper"),
    Case(REDUCE, "two_shot kernel=hopper", {"norm": Norm(eps=1e-5, residual=True)}),
    Case(REDUCE, "one_shot_pull", {"norm": Norm(eps=1e-5)}),
)


def tensors_of(plan: Plan) -> dict[str, torch.Tensor]:
    """The caller's, as the operators pass them."""
    problem = plan.problem
    buffers = [buffer for buffer in plan.schedule.buffers if buffer.home in (INPUT, OUTPUT)]
    shapes = {buffer.name: (buffer.rows, buffer.cols, buffer.dtype or problem.dtype) for buffer in buffers}
    sides = (*problem.epilogue.inputs, *((*problem.norm.inputs, Z) if problem.norm else ()))
    shapes |= {name: problem.operand(name) for name in sides}
    made = {
        name: torch.zeros((rows, cols), dtype=getattr(torch, dtype)) for name, (rows, cols, dtype) in shapes.items()
    }
    turned = [name for name in made if problem.b_is_transposed and name.split(".")[0] in ("w", "gate")]
    return made | {name: made[name].t().contiguous().t() for name in turned}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_compile_with_the_arguments_of_a_launch(case: Case, launched: list[str]) -> None:
    plan = case.build()
    layout = lay_out(plan.schedule, plan.realization.dtype)
    tensors = tensors_of(plan)
    slot: Any = HostSlot(layout.size_bytes)
    bound = launch.BoundSlot(plan, workspace(), slot, launch_order(plan, 0), tensors, False)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    bound.begin(CALLER.cuda_stream)
    for enqueue in bound.enqueue:
        enqueue(CALLER, tensors, addresses)
    engines = {assignment.engine for assignment in plan.realization.engines}
    kinds = {"tile_kernel": "matmul", "reduce_kernel": "reduction", "copy_kernel": "copy"}
    for kind in (kinds[engine] for engine in engines if engine in kinds):
        assert any(kind in name for name in launched), launched
