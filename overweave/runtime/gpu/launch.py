"""Bind plans on GPUs: run by cuBLAS and NCCL alone, by packed messages, or in the memory of a workspace."""

from __future__ import annotations

from functools import partial
from typing import Any

from overweave.ir.launch.order import launch_order
from overweave.ir.launch.streams import most_sms, queues_beside
from overweave.ir.plan import Plan
from overweave.ir.schedule import ECHOES
from overweave.memory.cuda.workspace import Workspace
from overweave.memory.group import Group, create_subgroups
from overweave.runtime.gpu.bound import BoundPlan
from overweave.runtime.gpu.call_frame import PlanRun
from overweave.runtime.gpu.packed import PackedPlan
from overweave.runtime.gpu.replays import may_replay
from overweave.runtime.kernel_calls.bind import TensorsByName
from overweave.runtime.library.run import LibraryRun, is_library_plan


def side_queues(plan: Plan, rank: int) -> list[str]:
    """Return the queues that a rank launches on side streams, in launch order."""
    return [action.queue for action in launch_order(plan, rank) if action.queue in queues_beside(plan)]


def bind_with_prologue(
    plan: Plan, workspace: Workspace, example: TensorsByName, is_traced: bool = False
) -> PlanRun[BoundPlan]:
    """Bind a plan, whose calls have a prologue, to a workspace. Collective if that must grow.

    is_traced: kernels record when each tile ran, and events when other operations did (runtime/gpu/trace.py). A traced
    call is enqueued one by one, never launched as a graph.
    """
    rank = workspace.group.rank
    create_subgroups(workspace.group, plan.schedule.of_rank(rank), partial(most_sms, plan))
    bound = BoundPlan(plan, workspace, example, is_traced)
    bound.prepare({name: tensor.data_ptr() for name, tensor in example.items()})
    return PlanRun(workspace, bound, side_queues(plan, rank), not is_traced and may_replay(plan))


def bind(plan: Plan, group: Group, example: TensorsByName) -> PlanRun[Any] | LibraryRun:
    """Bind a plan on this rank's GPU. example: tensors as of a call.

    Collective if the plan is the first that needs the group's workspace, or makes it grow.
    """
    if is_library_plan(plan):
        return LibraryRun(plan, group, example)
    workspace = Workspace.of(group, example["w"].device)
    if plan.schedule.reuse == ECHOES:
        packed = PackedPlan(plan, workspace, example)
        return PlanRun(workspace, packed, (), packed.may_replay)
    return bind_with_prologue(plan, workspace, example)
