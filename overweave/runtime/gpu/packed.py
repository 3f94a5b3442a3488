"""Plans of packed messages on a GPU: one kernel, and a matmul before or behind it, the library's or ours.

No head of the call, no other stream. Both are one graph once a call's tensors come back (runtime/gpu/replays.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby

import torch

from overweave.ir.plan import LIBRARY, Plan
from overweave.ir.schedule import LOCAL, Compute, Operation
from overweave.memory.cuda.workspace import Workspace
from overweave.memory.packed_layout import lay_out_packed
from overweave.runtime.gpu.launcher import Launch, supports_dependent_launch
from overweave.runtime.kernel_calls.call import MatrixInput, stand_in_for
from overweave.runtime.kernel_calls.packed import Caller, packed_call
from overweave.runtime.kernel_calls.protocol import control_words
from overweave.runtime.kernel_calls.skinny import ChainPosition, SkinnyOperands, skinny_call
from overweave.runtime.library.calls import library_call
from overweave.runtime.library.views import shapes_of

EnqueuePacked = Callable[[torch.cuda.Stream, Mapping[str, torch.Tensor], dict[str, int]], None]


class PackedPlan:
    """A plan bound to the packed space of a workspace. Collective if the space must grow.

    Calls become graphs only where programs are fewer than SMs. To make a graph the driver may wait until kernels of
    this rank have ended. Another library's kernel among them waits for its part on a peer, which needs an SM there; a
    peer that is ahead has launched this call, whose programs wait for this rank. With an SM that they leave alone the
    other kernel ends. Programs of a matmul that starts early behind a gather hold SMs as long. (Calls with a head need
    no such rule: their kernels run once every peer has begun the call.)
    """

    begin = prepare = None
    copied = ()  # kernels know addresses alone

    def __init__(self, plan: Plan, workspace: Workspace, example: Mapping[str, torch.Tensor]) -> None:
        self._plan, self._workspace = plan, workspace
        self._space = workspace.packed_space(lay_out_packed(plan).half_bytes)
        self._own = self._own_buffers()
        self._moving = {name: stand_in_for(tensor) for name, tensor in example.items()}
        self._known: dict[str, MatrixInput] = {**self._moving, **self._own}
        operations = tuple(plan.schedule.of_rank(workspace.group.rank))
        engines = groupby(operations, lambda operation: plan.realization.engine_of(operation.queue))
        runs = [(engine == LIBRARY, tuple(members)) for engine, members in engines]
        skinny = plan.realization.skinny
        has_both = len(runs) == 2 and any(is_library and _has_rows(members) for is_library, members in runs)
        self._is_chained = (
            has_both and skinny is not None and skinny.early and supports_dependent_launch(workspace.device)
        )
        self._held = 0  # programs that are on SMs while messages are waited for
        steps = [self._bound(is_library, members, at > 0) for at, (is_library, members) in enumerate(runs)]
        self.enqueue: tuple[EnqueuePacked, ...] = (self._move, *(one for step in steps for one in step))
        self.may_replay = self._held < torch.cuda.get_device_properties(workspace.device).multi_processor_count
        del self._plan

    def _move(self, stream: torch.cuda.Stream, tensors: object, addresses: dict[str, int]) -> None:
        """Kernels find the tensors of this call."""
        for name, address in addresses.items():
            self._moving[name].address = address

    def _bound(self, is_library: bool, operations: tuple[Operation, ...], follows: bool) -> list[EnqueuePacked]:
        """What neighbours in launch order do: library calls one by one, or the kernel that does them all; where a plan
        says so, our matmuls one by one. follows: others stand before them."""
        if not is_library:
            return [_enqueue_launch(self._kernel(follows))]
        if self._plan.realization.skinny is not None:
            return [_enqueue_launch(launch) for launch in self._matmuls(operations, follows)]
        shapes, problem, group = shapes_of(self._known), self._plan.problem, self._workspace.group
        return [self._calling(library_call(operation, problem, shapes, group)) for operation in operations]

    def _calling(self, call: Callable[[dict[str, torch.Tensor]], None]) -> EnqueuePacked:
        return lambda stream, tensors, addresses: call({**tensors, **self._own})

    def _matmuls(self, operations: tuple[Operation, ...], follows: bool) -> list[Launch]:
        """Those that have rows. The packed kernel is a neighbour of the first, or the last."""
        computes = [each for each in operations if isinstance(each, Compute) and not each.writes[0].is_empty]
        neighbour = 0 if follows else len(computes) - 1
        turn: ChainPosition = "follows" if follows else "leads"
        return [
            self._matmul(each, turn if self._is_chained and at == neighbour else "in_turn")
            for at, each in enumerate(computes)
        ]

    def _matmul(self, compute: Compute, turn: ChainPosition) -> Launch:
        """Of whole matrices, as verify knows them in such a plan."""
        config = self._plan.realization.skinny
        assert config is not None
        factors = SkinnyOperands(*(self._known[part.buffer] for part in (compute.a[0], compute.b, compute.out[0])))
        launch = Launch(skinny_call(config, factors, self._workspace.shares, turn))
        self._held += launch.programs if turn == "follows" else 0
        return launch

    def _kernel(self, is_later: bool) -> Launch:
        plan, workspace = self._plan, self._workspace
        config = plan.realization.packed
        assert config is not None
        caller = Caller(workspace.group.rank, (control_words(workspace), workspace.limits), self._is_chained, is_later)
        launch = Launch(packed_call(config, plan.problem, lay_out_packed(plan), self._known, self._space, caller))
        self._held += launch.programs
        return launch

    def _own_buffers(self) -> dict[str, torch.Tensor]:
        """This rank's product, or what it gathers, by the name of its buffer."""
        local = [each for each in self._plan.schedule.buffers if each.home == LOCAL]
        dtypes = {each.name: getattr(torch, each.dtype or self._plan.realization.dtype) for each in local}
        return {each.name: self._space.product((each.rows, each.cols), dtypes[each.name]) for each in local}


def _has_rows(operations: tuple[Operation, ...]) -> bool:
    return any(not region.is_empty for each in operations for region in each.writes)


def _enqueue_launch(launch: Launch) -> EnqueuePacked:
    start = launch.start
    return lambda stream, tensors, addresses: start(stream.cuda_stream)
