"""Runs plans of packed messages on a GPU: the library's matmul, then one kernel; no head, no other stream."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from overweave.ir.plan import LIBRARY, PACKED_KERNEL, Plan
from overweave.ir.schedule import INPUT, OUTPUT
from overweave.memory.packed_layout import lay_out_packed
from overweave.memory.workspace import Workspace
from overweave.runtime.call_frame import CallFrame
from overweave.runtime.epilogue import run_with_epilogue
from overweave.runtime.kernels import Launch, moving, packed_launch
from overweave.runtime.views import Views

Tensors = Mapping[str, torch.Tensor]


class PackedRun(CallFrame):
    """A plan bound to the packed space of a workspace: call it with the tensors of every input and output buffer.

    Binding is collective if the space must grow. A call enqueues its work on the current stream and returns; under
    capture it is captured. Raises PeerError for what went wrong in an earlier call."""

    def __init__(self, plan: Plan, workspace: Workspace, example: Tensors) -> None:
        super().__init__(workspace)
        self._plan = plan
        self._layout = lay_out_packed(plan)
        self._dtype = getattr(torch, self._layout.dtype)
        self._space = workspace.packed_space(self._layout.half_bytes)
        engines, operations = plan.realization, tuple(plan.schedule.of_rank(workspace.group.rank))
        self._library = [each for each in operations if engines.engine_of(each.queue) == LIBRARY]
        self._own = self._own_buffers()
        self._views = Views(self._library, {name: tuple(each.shape) for name, each in {**example, **self._own}.items()})
        self._packed = [each for each in operations if engines.engine_of(each.queue) == PACKED_KERNEL]
        self._out = moving(example["y"])
        self._launch = self._bound() if self._packed else None

    def __call__(self, tensors: Tensors) -> None:
        """Runs the plan once. `tensors`: by buffer name, shaped as the plan's problem says."""
        self.run_call(lambda stream, is_captured: self._enqueue(stream, tensors))

    def _enqueue(self, stream: torch.cuda.Stream, tensors: Tensors) -> None:
        view = self._views.of({**tensors, **self._own})
        for operation in self._library:
            run_with_epilogue(operation, self._plan.problem, view, (tensors, self._workspace.group))
        if self._launch is not None:
            self._out.address = tensors["y"].data_ptr()
            self._launch(stream.cuda_stream)

    def _bound(self) -> Launch:
        config, workspace, layout = self._plan.realization.packed, self._workspace, self._layout
        assert config is not None
        rank, ranks = workspace.group.rank, workspace.group.world_size
        words = workspace.words.view(0, (workspace.words.tensor.numel() // 4,), torch.int32)
        product = self._space.product(layout.shape, self._dtype)
        arrays = [product, self._out, self._space.spaces, self._space.state, words, workspace.limits]
        counts = [layout.words] if config.shots == 1 else [layout.words, layout.sum_words]
        numbers = [*counts, layout.part_bytes, self._space.half_bytes, rank, ranks]
        return packed_launch(config, [*arrays, *numbers], layout.messages, ranks)

    def _own_buffers(self) -> dict[str, torch.Tensor]:
        """This rank's product, by the name of its buffer."""
        seen = {part.buffer for each in self._library for part in (*each.reads, *each.writes)}
        buffers = [each for each in self._plan.schedule.buffers if each.name in seen]
        own = [each for each in buffers if each.home not in (INPUT, OUTPUT)]
        return {each.name: self._space.product((each.rows, each.cols), self._dtype) for each in own}
