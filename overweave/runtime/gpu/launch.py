"""Plans on GPUs, ready to be called: by a library alone, by packed messages, or in the slots of a workspace."""

from __future__ import annotations

from overweave.ir.launch.order import launch_order
from overweave.ir.launch.streams import queues_beside
from overweave.ir.plan import LIBRARY, Plan
from overweave.ir.schedule import ECHOES
from overweave.memory.cuda.workspace import Workspace
from overweave.memory.group import Group
from overweave.memory.layout import lay_out
from overweave.memory.lower import refuse_permuted
from overweave.memory.subgroups import make_parts
from overweave.runtime.gpu.bound import BoundSlot
from overweave.runtime.gpu.call_frame import SlotCalls
from overweave.runtime.gpu.packed import PackedRun
from overweave.runtime.gpu.replays import may_replay
from overweave.runtime.kernel_calls.bind import Tensors
from overweave.runtime.library.run import LibraryRun


def sides_of(plan: Plan, rank: int) -> list[str]:
    """The queues that a rank launches on streams of their own, in the order of their launches."""
    return [action.queue for action in launch_order(plan, rank) if action.queue in queues_beside(plan)]


class CudaRun(SlotCalls[BoundSlot]):
    """A plan bound to a workspace: call it with the tensors of every input and output buffer.

    Binding is collective if the workspace must grow. A call enqueues its work on the current stream and returns; under
    capture it is captured. Raises PeerError for what went wrong in an earlier call.

    is_traced: kernels write down when each tile ran, and events when everything else did (runtime/trace/gpu.py). Copies
    are then enqueued one by one, never captured.
    """

    def __init__(self, plan: Plan, workspace: Workspace, example: Tensors, is_traced: bool = False) -> None:
        make_parts(workspace.group, plan.schedule.of_rank(workspace.group.rank))
        leased = workspace.lease(lay_out(plan.schedule, plan.realization.dtype))
        slots = [BoundSlot(plan, workspace, slot, example, is_traced) for slot in leased]
        addresses = {name: tensor.data_ptr() for name, tensor in example.items()}
        for bound in slots:
            bound.prepare(addresses)
        # What a trace times is enqueued one by one.
        super().__init__(workspace, slots, sides_of(plan, workspace.group.rank), not is_traced and may_replay(plan))

    def __call__(self, tensors: Tensors) -> None:
        """Runs the plan once. `tensors`: by buffer name, shaped as the plan's problem says."""
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        self.run_in_turn(tuple(addresses.values()), addresses, (tensors, addresses))


def bind(plan: Plan, group: Group, example: Tensors) -> CudaRun | LibraryRun | PackedRun:
    """The plan ready to run on this rank's GPU; `example` are tensors as it will be called with.

    Collective if the plan is the first that needs the group's workspace, or makes it grow.
    """
    refuse_permuted(plan.schedule)
    is_library = all(assignment.engine == LIBRARY for assignment in plan.realization.engines)
    if is_library and not plan.schedule.pads and not queues_beside(plan):
        return LibraryRun(plan, group, example)
    workspace = Workspace.of(group, example["w"].device)
    if plan.schedule.reuse == ECHOES:
        return PackedRun(plan, workspace, example)
    return CudaRun(plan, workspace, example)
