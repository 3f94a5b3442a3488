"""On which streams, and behind what, the kernels of a plan with pushes by SMs are launched. Nothing here runs."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from overweave.ir.launch.order import launch_order
from overweave.ir.launch.streams import queues_beside
from overweave.ir.plan import COPY_KERNEL, Plan
from overweave.kernels.copy import copy_kernel
from overweave.memory.layout import lay_out
from overweave.runtime.kernel_calls.bind import Binding, kernel_call
from tests.plans import plan_of
from tests.runtime.gpu.launch_log import logged
from tests.runtime.gpu.test_bind import tensors_of

BY_KERNEL = {"mover": "copy_kernel", "copy_programs": 4, "block_m": 64, "block_n": 128}
made = partial(plan_of, m=1000, n=512, k=512)


def pushing_queue(plan: Plan) -> str:
    return next(one.queue for one in plan.realization.engines if one.engine == COPY_KERNEL)


def test_only_what_runs_beside_has_a_stream_to_join():
    plans = [made("matmul_reduce_scatter.scatter", BY_KERNEL | {"sms": sms}) for sms in (8, 132)]
    beside = [{action.queue for action in launch_order(plan, 0)} & queues_beside(plan) for plan in plans]
    assert beside == [{"copies.kernel"}, set()]


@pytest.mark.parametrize(("name", "source"), [("all_gather_matmul.push", "x"), ("matmul_reduce_scatter.scatter", None)])
def test_the_kernel_gets_what_it_takes(name: str, source: str | None, monkeypatch: pytest.MonkeyPatch):
    """source: the caller's tensor, whose address of each call the launch follows."""
    plan = made(name, BY_KERNEL)
    with logged(1, 3, monkeypatch) as log:
        heap = log.workspace.lease(lay_out(plan.schedule, "bfloat16"))
        binding = Binding(plan, log.workspace, heap, tensors_of(plan, 1), 132)
    call = kernel_call(binding, pushing_queue(plan))
    assert call is not None
    taken = dict(zip(copy_kernel.arg_names, call.arguments, strict=True))
    rows = plan.tile_order(1, pushing_queue(plan)).rows
    queue, words = taken["queue"], taken["protocol"]
    assert (queue.tiles, taken["row_words"], words.world_size) == (len(rows), 512 * 2 // 16, 3)
    assert taken["targets"].shape == (len({row.operation for row in rows}), 2)
    assert queue.table.tolist() == [list(row) for row in rows]
    assert queue.claims.data_ptr() == log.workspace.claims[2:].data_ptr()
    assert (taken["source"].dtype, call.programs) == (torch.int32, 4)
    assert binding.stand_ins == ([(source, taken["source"])] if source else [])
