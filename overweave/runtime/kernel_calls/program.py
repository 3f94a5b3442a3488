"""Arguments of kernels fused by hand: channels and symmetric tensors in the memory of a workspace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from overweave.kernels.arguments import SignalWords
from overweave.lang.arguments import Channel, SymmetricLayout, SymmetricTensor
from overweave.memory.heap import Heap
from overweave.memory.layout import SIGNAL_STRIDE_WORDS, SlotLayout
from overweave.runtime.handwritten import ChannelArgument, Declared, Part, TensorArgument, TileLaunch
from overweave.runtime.kernel_calls.call import addresses_tensor


class ProgramArguments:
    """The arguments of one rank's kernels. fold: turns a layout into a constexpr for Triton's compiler; the identity
    under the interpreter."""

    def __init__(
        self,
        declared: Declared,
        layout: SlotLayout,
        heap: Heap,
        protocol: SignalWords,
        rank: int,
        fold: Callable[[Any], Any],
    ) -> None:
        self._declared, self._layout, self._heap = declared, layout, heap
        self._channels = {
            name: Channel(
                signals=protocol.signals[layout.signal(name, 0) * SIGNAL_STRIDE_WORDS :],
                peers=self._addresses_on_all_ranks(layout.signal_offset(name, 0), protocol.limits.device),
                words=protocol.words,
                limits=protocol.limits,
                producer_table=None,
                consumer_table=None,
                counts=None,
                rank=rank,
                number=declared.number(name),
                layout=fold(channel),
            )
            for name, channel in declared.channels.items()
        }
        self._tensors = {
            name: SymmetricTensor(
                self.own(name),
                self._addresses_on_all_ranks(layout.buffers[name], protocol.limits.device),
                fold(SymmetricLayout(buffer.cols, buffer.is_shard)),
            )
            for name, buffer in declared.buffers.items()
        }

    def of(self, launch: TileLaunch) -> tuple[list[Any], dict[str, Any]]:
        """Return a kernel's arguments and options, with channels and tensors in place of their names."""
        options = {name: self._argument(value) for name, value in launch.options.items()}
        return [self._argument(argument) for argument in launch.arguments], options

    def own(self, name: str) -> torch.Tensor:
        """Return this rank's instance of a buffer."""
        buffer = self._declared.buffers[name]
        return self._heap.view(self._layout.buffers[name], (buffer.rows, buffer.cols), buffer.dtype)

    def channel(self, name: str) -> Channel:
        """Return a channel with its static mapping."""
        return self._channels[name]

    def _argument(self, value: Any) -> Any:
        """Return a kernel argument: a channel, a symmetric tensor, a view of a part, or the value itself."""
        if isinstance(value, ChannelArgument):
            tables = (value.producer_table, value.consumer_table, value.counts)
            named = dict(zip(("producer_table", "consumer_table", "counts"), tables, strict=True))
            return self._channels[value.name]._replace(**named)
        if isinstance(value, TensorArgument):
            return self._tensors[value.name]
        return self.own(value.buffer)[slice(*value.rows), slice(*value.cols)] if isinstance(value, Part) else value

    def _addresses_on_all_ranks(self, offset: int, device: torch.device) -> torch.Tensor:
        """Return the address at an offset of the heap on every rank."""
        return addresses_tensor([base + offset for base in self._heap.addresses], device)
