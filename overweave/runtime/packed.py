"""Runs plans of packed messages on a GPU: one kernel, and the library's matmul before or behind it.

No head of the call, no other stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby

import torch

from overweave.ir.plan import LIBRARY, Plan
from overweave.ir.schedule import LOCAL, Operation
from overweave.memory.packed_layout import lay_out_packed
from overweave.memory.workspace import Workspace
from overweave.runtime.call_frame import CallFrame
from overweave.runtime.epilogue import run_with_epilogue
from overweave.runtime.kernels import Launch, moving, packed_launch
from overweave.runtime.library import View
from overweave.runtime.packed_call import Caller, packed_arguments
from overweave.runtime.views import Views

Tensors = Mapping[str, torch.Tensor]
Enqueue = Callable[[torch.cuda.Stream, Tensors, View], None]


class PackedRun(CallFrame):
    """A plan bound to the packed space of a workspace: call it with the tensors of every input and output buffer.

    Binding is collective if the space must grow. A call enqueues its work on the current stream and returns; under
    capture it is captured. Raises PeerError for what went wrong in an earlier call."""

    def __init__(self, plan: Plan, workspace: Workspace, example: Tensors) -> None:
        super().__init__(workspace)
        self._plan = plan
        self._space = workspace.packed_space(lay_out_packed(plan).half_bytes)
        self._own = self._own_buffers()
        self._moving = {name: moving(tensor) for name, tensor in example.items()}
        operations = tuple(plan.schedule.of_rank(workspace.group.rank))
        engines = groupby(operations, lambda operation: plan.realization.engine_of(operation.queue))
        runs = [(engine == LIBRARY, tuple(members)) for engine, members in engines]
        library = [each for is_library, members in runs if is_library for each in members]
        self._views = Views(library, {name: tuple(each.shape) for name, each in {**example, **self._own}.items()})
        self._steps = [self._bound(is_library, members) for is_library, members in runs]

    def __call__(self, tensors: Tensors) -> None:
        """Runs the plan once. `tensors`: by buffer name, shaped as the plan's problem says."""
        self.run_call(lambda stream, is_captured: self._enqueue(stream, tensors))

    def _enqueue(self, stream: torch.cuda.Stream, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            self._moving[name].address = tensor.data_ptr()
        view = self._views.of({**tensors, **self._own})
        for enqueue in self._steps:
            enqueue(stream, tensors, view)

    def _bound(self, is_library: bool, operations: tuple[Operation, ...]) -> Enqueue:
        """What neighbours in launch order do: library calls one by one, or the kernel that does them all."""
        problem, group = self._plan.problem, self._workspace.group
        if not is_library:
            launch = self._kernel()
            return lambda stream, tensors, view: launch(stream.cuda_stream)

        def run(stream: torch.cuda.Stream, tensors: Tensors, view: View) -> None:
            for operation in operations:
                run_with_epilogue(operation, problem, view, (tensors, group))

        return run

    def _kernel(self) -> Launch:
        config, workspace = self._plan.realization.packed, self._workspace
        assert config is not None
        words = workspace.words.view(0, (workspace.words.tensor.numel() // 4,), torch.int32)
        caller = Caller(workspace.group.rank, (words, workspace.limits), config.block)
        layout = lay_out_packed(self._plan)
        arguments, programs = packed_arguments(self._plan, layout, {**self._moving, **self._own}, self._space, caller)
        return packed_launch(config, arguments, programs)

    def _own_buffers(self) -> dict[str, torch.Tensor]:
        """This rank's product, or what it gathers, by the name of its buffer."""
        local = [each for each in self._plan.schedule.buffers if each.home == LOCAL]
        dtypes = {each.name: getattr(torch, each.dtype or self._plan.realization.dtype) for each in local}
        return {each.name: self._space.product((each.rows, each.cols), dtypes[each.name]) for each in local}
