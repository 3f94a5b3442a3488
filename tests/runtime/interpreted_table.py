"""The table of operators by the actual kernels, interpreted: their public functions, whose plans run at that depth.

Run by test_interpreter.py in a process of its own: where triton has been imported for compiling it cannot interpret.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from campaigns.cases import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER  # noqa: E402
from campaigns.exact.calls import BARE, FP8, Case, Form  # noqa: E402
from overweave.ir.plan import Plan  # noqa: E402
from overweave.memory.group import Group  # noqa: E402
from overweave.ops.call import prepare  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from overweave.runtime.host.host import as_matrices, run_on_host  # noqa: E402
from tests.ops.table import faults  # noqa: E402
from tests.ops.test_rows_in_strips import wrong_strips  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

load("host interpreter")  # here, once, and not in every rank

HALF, FLOAT = torch.float16, torch.float32
# Of tiles: small ones, several to a piece; those of the last wave cut in halves, or quarters.
SMALL = "block_m=16 block_n=32"
HALVES, QUARTERS = "block_m=16 block_n=128 split_n=2 sms=6", "block_m=16 block_n=256 split_n=4 sms=4"
WAVES = f"waves sms=5 library_sms=2 {SMALL}"
SILU, ADDED = Form(bias=True, activation="silu", residual=True), Form(bias=True, residual=True)
BY_ROWS, BY_TENSOR = Form(scaling="rows"), Form(scaling="tensor")
NORMED = (Form(norm=True), Form(norm=True, residual=True))


class Row(NamedTuple):
    """Calls of a plan. has: what some tile of its table must have, or the plan is not the one that is meant."""

    operator: str
    plan: str
    rows: tuple[int, ...]
    n: int = 40
    k: int = 16
    forms: tuple[Form, ...] = (BARE,)
    dtype: torch.dtype = torch.bfloat16
    worlds: tuple[int, ...] = (2, 3)
    has: str = ""

    def cases(self) -> list[Case]:
        turned = self.dtype == FP8
        return [
            Case(self.operator, m, self.n, self.k, self.dtype, turned or (m + index) % 2 > 0, self.plan, form)
            for m in self.rows
            for index, form in enumerate(self.forms)
        ]


def products() -> Iterator[Row]:
    """Products alone: empty and short pieces, and shards without rows."""
    gather, scatter = partial(Row, ALL_GATHER), partial(Row, REDUCE_SCATTER)
    for few in (partial(gather, worlds=(1, 2, 3)), partial(scatter, worlds=(1, 2, 3))):
        name = "push" if few.args == (ALL_GATHER,) else "scatter"
        yield few(f"{name} pieces=2", (0, 1, 37))
        copied = f"{name} mover=copy_kernel copy_programs=1"
        yield few(copied, (0, 1), 104, 208, worlds=(1, 3))
        yield few(f"{copied} sms=1", (37,), 104, 208, worlds=(1, 4))
        yield few(f"{copied} pieces=1", (150,), 104, 208, worlds=(2,))
        yield few(f"{copied} order=all_peers", (75,), 104, 208, worlds=(2, 3))
        yield few(f"{name} {HALVES}", (37,), 200, worlds=(2,), has="width")
    yield gather("pull pieces=2", (0, 1, 37), worlds=(1, 2, 3))
    yield scatter(f"scatter {QUARTERS}", (37,), 424, worlds=(2,), has="width")
    added = "scatter sums=epilogue block_m=16"
    yield scatter(f"{added} block_n=64 pieces=2", (0, 1), 168)
    yield scatter(f"{added} block_n=64 pieces=2 order=all_peers", (37,), 168, worlds=(2, 4))
    yield scatter(f"{added} block_n=64 pieces=3", (90,), 168, worlds=(3,))
    yield scatter(f"scatter sums=epilogue pieces=2 {HALVES}", (64, 150), 168, worlds=(2, 4))
    for operator, plan in (
        (REDUCE_SCATTER, "remote_add"),
        (REDUCE_SCATTER, "fused_ring"),
        (REDUCE_SCATTER, "scatter_stored"),
        (REDUCE_SCATTER, "ring_stored"),
        (ALL_REDUCE, "ring_stored"),
    ):
        last = "block_m=16 block_n=64 sms=1" if plan == "remote_add" else HALVES
        yield Row(operator, f"{plan} block_m=16 block_n=64 pieces=3", (0, 37), 168, worlds=(2, 3))
        yield Row(operator, f"{plan} {last} pieces=2", (90,), 168, worlds=(3, 4))
        yield Row(operator, f"{plan} {last} pieces=2", (1, 70), 168, worlds=(1, 8))
    yield Row(ALL_REDUCE, WAVES, (75,), 72, 24, worlds=(1, 2, 3))
    yield Row(REDUCE_SCATTER, WAVES, (99,), 72, 24, worlds=(1, 2, 3))
    yield Row(ALL_REDUCE, f"{WAVES} groups=1", (32,), 32, 24, worlds=(2,))


def packed() -> Iterator[Row]:
    """Packed messages: a row takes one turn of a program or many."""
    for operator, plan in (
        (ALL_GATHER, "gather_packed"),
        (REDUCE_SCATTER, "scatter_packed"),
        (ALL_REDUCE, "one_shot_packed"),
        (ALL_REDUCE, "two_shot_packed"),
    ):
        yield Row(operator, plan, (0, 1, 37), 40, 48, worlds=(1, 2, 3, 4, 8))
        yield Row(operator, plan, (3,), 24, 32, dtype=FLOAT, worlds=(2, 3))
        yield Row(operator, plan, (5,), 8, 16, dtype=HALF, worlds=(2, 3))
        yield Row(operator, f"{plan} matmul=skinny", (0, 37), 40, 48, worlds=(2, 3))
    yield Row(ALL_GATHER, "gather_packed", (1, 7), 64, 16, (Form(weights=2, gathered=True),))


def ended() -> Iterator[Row]:
    """What kernels do to a product, or to a sum, once and in fp32."""
    small = f"{SMALL} pieces=2"
    activations = tuple(Form(bias=True, activation=each, residual=True) for each in ("silu", "gelu", "gelu_tanh"))
    gates = Form(gate=True, activation="silu"), Form(gate=True, activation="gelu", residual=True), Form(gate=True)
    yield Row(ALL_GATHER, f"push {SMALL}", (40,), forms=activations, worlds=(2,))
    yield Row(ALL_GATHER, f"push {SMALL} block_k=16", (40,), 40, 24, gates, worlds=(2,))
    sums = [(REDUCE_SCATTER, f"{name} {small}") for name in ("scatter", "scatter sums=epilogue", "fused_ring")]
    sums += [(REDUCE_SCATTER, f"{name} {small}") for name in ("scatter_stored", "ring_stored", "remote_add")]
    sums += [(REDUCE_SCATTER, "scatter sums=epilogue pieces=1 block_m=16 block_n=128 split_n=2 sms=3")]
    sums += [(REDUCE_SCATTER, f"scatter_pull {small}"), (REDUCE_SCATTER, "scatter_packed")]
    sums += [(ALL_REDUCE, plan) for plan in ("one_shot_packed", "two_shot_packed", f"two_shot {small}")]
    sums += [(ALL_REDUCE, f"{name} {small}") for name in ("ring_stored", "two_shot sums=epilogue")]
    for index, (operator, plan) in enumerate(sums):
        yield Row(operator, plan, (1,), forms=(SILU,), worlds=(2,))
        yield Row(operator, plan, (37,), forms=(ADDED,), worlds=(3,))
        if "packed" in plan or "fused_ring" in plan:
            yield Row(operator, plan, (9,), forms=(SILU,), dtype=FLOAT, worlds=(2,))
            yield Row(operator, plan, (9,), forms=(Form(activation="gelu"),), dtype=HALF, worlds=(2,))
        yield Row(operator, plan, (37,), 48, 64, (BY_ROWS, BY_TENSOR)[index % 2 :], FP8, (1, 2))
        if operator == REDUCE_SCATTER and plan.split()[0] not in ("scatter", "scatter_pull", "scatter_packed"):
            continue
        if "epilogue" in plan or "ring" in plan:
            continue
        yield Row(operator, plan, (1, 19), forms=NORMED)
        if "packed" in plan:
            yield Row(operator, plan, (9,), forms=NORMED[1:], dtype=HALF, worlds=(2,))
            yield Row(operator, plan, (5,), 296, forms=NORMED, dtype=FLOAT, worlds=(3,))
    for operator in (REDUCE_SCATTER, ALL_REDUCE):
        yield Row(operator, WAVES, (1, 19), forms=NORMED)


def several() -> Iterator[Row]:
    """Several weights over one gather, and fp8 operands with their scales: what each tile reads begins at its own."""
    two, three = Form(weights=2), Form(weights=3)
    yield Row(ALL_GATHER, f"push pieces=2 {SMALL}", (37,), 104, forms=(two, three), has="weight")
    yield Row(ALL_GATHER, f"push {HALVES}", (37,), 280, forms=(three,), worlds=(1, 2), has="width")
    copied = f"push mover=copy_kernel copy_programs=1 {SMALL}"
    yield Row(ALL_GATHER, copied, (75,), 144, forms=(two,), worlds=(2, 4), has="weight")
    yield Row(ALL_GATHER, f"pull pieces=2 {SMALL}", (50,), 96, forms=(three,), worlds=(2, 3))
    yield Row(ALL_GATHER, f"push {SMALL}", (0, 1), 96, forms=(three,), worlds=(2, 3))
    yield Row(ALL_GATHER, f"push {SMALL} block_k=32", (20,), 96, 64, (Form(weights=3, bias=True),), worlds=(1, 2))
    tiles = f"{SMALL} block_k=32 pieces=2"
    scaled = BY_ROWS, BY_TENSOR, Form(scaling="rows", gate=True), Form(scaling="tensor", gate=True)
    scaled += (Form(scaling="rows", gate=True, activation="silu", residual=True),)
    scaled += tuple(Form(scaling=each, weights=3, bias=True) for each in ("rows", "tensor"))
    for plan in (f"push {tiles}", f"push mover=copy_kernel copy_programs=2 {tiles}", f"pull {tiles}"):
        for form in scaled:
            n = 144 if form.weights > 1 else 48
            yield Row(ALL_GATHER, plan, (37,), n, 64, (form,), FP8, (1, 2) if form.gate else (2,))


ROWS = (*products(), *packed(), *ended(), *several())


def bind(has: str, plan: Plan, group: Group, tensors: Any) -> tuple[Any, None]:
    """In the place of what binds plans to CPU ranks: kernels run, and rows that are normed are summed in four parts."""
    tiles = [row for order in plan.tile_orders for row in order.rows]
    assert not has or any(getattr(row, has) for row in tiles), f"{plan.name} has no {has}"
    sums = plan.realization.reduction
    if plan.problem.norm is not None and sums is not None:
        plan = replace(plan, realization=replace(plan.realization, reduction=replace(sums, parts=4)))
    outputs = {buffer.name for buffer in plan.schedule.buffers if buffer.home == "output"}
    outputs |= set(plan.problem.also_made)

    def run(moved: Any) -> None:
        inputs = {name: tensor for name, tensor in moved.items() if name not in outputs}
        made = {name: moved[name].fill_(torch.nan) for name in outputs}
        run_on_host(plan, group, as_matrices(inputs), made, depth="interpreter")

    return run, None


@contextmanager
def interpreted(has: str = "") -> Iterator[None]:
    with patch.object(prepare, "_bind", partial(bind, has)):
        yield


def wrong(row: Row) -> list[str]:
    """For `run_ranks`."""
    with interpreted(row.has):
        return faults(row.cases())


@pytest.mark.parametrize(
    ("row", "world_size"),
    [
        pytest.param(row, world_size, id=f"{row.operator}.{row.plan} W={world_size} {row.dtype} {row.forms[0]}")
        for row in ROWS
        for world_size in row.worlds
    ],
)
def test_every_row_of_the_table(row: Row, world_size: int):
    assert run_ranks(wrong, world_size, row, timeout_s=120) == [[]] * world_size


def wrong_in_strips(*heights: int) -> list[str]:
    with interpreted():
        return wrong_strips(*heights)


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_in_strips(world_size: int):
    """Whole strips, and lower ones in the last band."""
    assert run_ranks(wrong_in_strips, world_size, 32, 23, timeout_s=120) == [[]] * world_size
