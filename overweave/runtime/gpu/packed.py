"""Plans of packed messages on a GPU: one kernel, and a matmul before or behind it, of cuBLAS or ours.

There is no prologue and no side stream. Both are one graph once a call's tensors recur (runtime/gpu/call_frame.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby

import torch

from overweave.ir.plan import LIBRARY, Plan
from overweave.ir.schedule import LOCAL, Compute, Operation
from overweave.memory.cuda.workspace import Workspace
from overweave.memory.layout import lay_out_packed
from overweave.runtime.gpu.launcher import Launch, supports_dependent_launch
from overweave.runtime.kernel_calls.call import MatrixInput, stand_in_for
from overweave.runtime.kernel_calls.packed import Caller, ChainPosition, SkinnyOperands, packed_call, skinny_call
from overweave.runtime.kernel_calls.protocol import control_words
from overweave.runtime.library.calls import library_call, shapes_of

EnqueuePacked = Callable[[torch.cuda.Stream, Mapping[str, torch.Tensor], dict[str, int]], None]


class PackedPlan:
    """A plan bound to the packed space of a workspace. Collective if the space must grow.

    Calls become graphs only if waiting programs are fewer than SMs. Otherwise there could be a deadlock: to create a
    graph the driver may wait until this rank's kernels have ended; a kernel of NCCL, say, among them waits for an SM on
    a peer; a peer that is ahead has filled its SMs with this call, which waits for this rank. A matmul that starts
    early behind a gather holds its SMs as long. (Calls with a prologue need no such rule: their kernels run once every
    peer has enqueued the call.)
    """

    launch_prologue = prepare = None
    copied = ()  # kernels refer to tensors by address alone

    def __init__(self, plan: Plan, workspace: Workspace, example: Mapping[str, torch.Tensor]) -> None:
        self._plan, self._workspace = plan, workspace
        self._space = workspace.packed_space(lay_out_packed(plan).half_bytes)
        self._own = self._own_buffers()
        self._stand_ins = {name: stand_in_for(tensor) for name, tensor in example.items()}
        self._matrices: dict[str, MatrixInput] = {**self._stand_ins, **self._own}
        operations = tuple(plan.schedule.of_rank(workspace.group.rank))
        engines = groupby(operations, lambda operation: plan.realization.engine_of(operation.queue))
        runs = [(engine == LIBRARY, tuple(members)) for engine, members in engines]
        skinny = plan.realization.skinny
        has_both = len(runs) == 2 and any(is_library and _has_rows(members) for is_library, members in runs)
        self._is_chained = (
            has_both and skinny is not None and skinny.early and supports_dependent_launch(workspace.device)
        )
        self._waiting_programs = 0  # programs that hold SMs while they wait for messages
        steps = [self._bind_run(is_library, members, at > 0) for at, (is_library, members) in enumerate(runs)]
        self.enqueue: tuple[EnqueuePacked, ...] = (self._set_addresses, *(one for step in steps for one in step))
        self.may_replay = (
            self._waiting_programs < torch.cuda.get_device_properties(workspace.device).multi_processor_count
        )
        del self._plan

    def _set_addresses(self, stream: torch.cuda.Stream, tensors: object, addresses: dict[str, int]) -> None:
        """Set the addresses of this call's tensors in the kernels' arguments."""
        for name, address in addresses.items():
            self._stand_ins[name].address = address

    def _bind_run(self, is_library: bool, operations: tuple[Operation, ...], follows: bool) -> list[EnqueuePacked]:
        """Bind adjacent operations: cuBLAS calls or our matmuls one by one, or the one packed kernel of all of them.

        follows: there are operations before them.
        """
        if not is_library:
            return [_enqueue_launch(self._kernel(follows))]
        if self._plan.realization.skinny is not None:
            return [_enqueue_launch(launch) for launch in self._matmuls(operations, follows)]
        shapes, problem, group = shapes_of(self._matrices), self._plan.problem, self._workspace.group
        return [self._enqueue_call(library_call(operation, problem, shapes, group)) for operation in operations]

    def _enqueue_call(self, call: Callable[[dict[str, torch.Tensor]], None]) -> EnqueuePacked:
        return lambda stream, tensors, addresses: call({**tensors, **self._own})

    def _matmuls(self, operations: tuple[Operation, ...], follows: bool) -> list[Launch]:
        """Return the launches of matmuls that have rows. The packed kernel is next to the first, or to the last."""
        computes = [each for each in operations if isinstance(each, Compute) and not each.writes[0].is_empty]
        neighbour = 0 if follows else len(computes) - 1
        position: ChainPosition = "follows" if follows else "leads"
        return [
            self._matmul(each, position if self._is_chained and at == neighbour else "in_turn")
            for at, each in enumerate(computes)
        ]

    def _matmul(self, compute: Compute, position: ChainPosition) -> Launch:
        """Return the launch of a matmul of whole matrices, as verify requires in such a plan."""
        config = self._plan.realization.skinny
        assert config is not None
        operands = SkinnyOperands(*(self._matrices[part.buffer] for part in (compute.a[0], compute.b, compute.out[0])))
        launch = Launch(skinny_call(config, operands, self._workspace.shares, position))
        self._waiting_programs += launch.programs if position == "follows" else 0
        return launch

    def _kernel(self, is_later: bool) -> Launch:
        """Return the launch of the packed kernel. is_later: the matmul comes before it."""
        plan, workspace = self._plan, self._workspace
        config = plan.realization.packed
        assert config is not None
        caller = Caller(workspace.group.rank, (control_words(workspace), workspace.limits), self._is_chained, is_later)
        launch = Launch(packed_call(config, plan.problem, lay_out_packed(plan), self._matrices, self._space, caller))
        self._waiting_programs += launch.programs
        return launch

    def _own_buffers(self) -> dict[str, torch.Tensor]:
        """Return the local buffers: of the product, or of the gathered matrix."""
        local = [each for each in self._plan.schedule.buffers if each.home == LOCAL]
        dtypes = {each.name: getattr(torch, each.dtype or self._plan.realization.dtype) for each in local}
        return {each.name: self._space.product((each.rows, each.cols), dtypes[each.name]) for each in local}


def _has_rows(operations: tuple[Operation, ...]) -> bool:
    return any(not region.is_empty for each in operations for region in each.writes)


def _enqueue_launch(launch: Launch) -> EnqueuePacked:
    start = launch.start
    return lambda stream, tensors, addresses: start(stream.cuda_stream)
