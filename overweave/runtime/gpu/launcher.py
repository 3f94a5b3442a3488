"""Launches: a kernel compiled for fixed shapes, loaded, and started with a few microseconds of host time.

A `Launch` never compiles after its construction. Tensors that stay the same from call to call are bound as plain
addresses; others through a `Moving` stand-in (kernel_calls/call.py), whose address is read at each launch.

Triton's own wrapper encodes every tensor descriptor at each launch, which is most of its host time. Here a descriptor
is encoded again only when its tensor has moved, and Triton's C launcher is called (compat/triton_names.py). With a
Triton whose internals are unknown, its own wrapper is used: slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from overweave.compat.triton_names import COMPILE_OPTIONS, VERSIONS_CURE, CUDAOptions, encoded, quick_launch
from overweave.errors import KernelUnavailable
from overweave.ir.launch.streams import waits_without_deadline
from overweave.ir.plan import Plan
from overweave.ir.schedule import Operation, Wait
from overweave.ir.tile_order import NO_SIGNAL
from overweave.kernels.arguments import SignalWords
from overweave.memory.device.protocol import QUEUE_OPERATION
from overweave.memory.layout import SlotLayout
from overweave.runtime.backends import load
from overweave.runtime.kernel_calls.call import DEPENDENT_LAUNCH, KernelCall, notify_call, wait_call

MESSAGE_CHARACTERS = 400  # of a compiler's message in an error
MOST_ENCODED = 64  # tensor maps of 128 bytes that a descriptor caches


class Launch:
    """A compiled kernel with its grid, arguments and options, loaded. start: launches it on a stream.

    max_programs: at most so many programs, of a kernel whose programs claim tiles. programs: of the grid.
    """

    def __init__(self, call: KernelCall, max_programs: int | None = None) -> None:
        self.programs = call.programs if max_programs is None else max(1, min(call.programs, max_programs))
        self.compiled = compiled_for(call.kernel, call.arguments, (self.programs,), call.options)
        self.start: Callable[[int], None] = PackedLaunch(self.compiled, self.programs, call.arguments)


def compiled_for(kernel: Any, arguments: Any, grid: tuple[int, ...], options: dict[str, Any]) -> Any:
    """Compile a kernel for these arguments and load it. Raises KernelUnavailable if Triton or the driver fails."""
    try:
        compiled = kernel.warmup(*arguments, grid=grid, **(COMPILE_OPTIONS | options))
        compiled._init_handles()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers, ptxas and drivers of other machines raise errors of any type
        found = f"{type(error).__name__}: {error}".strip()[:MESSAGE_CHARACTERS]
        raise KernelUnavailable(f"compile {getattr(kernel, '__name__', kernel)}", found, VERSIONS_CURE) from error
    return compiled


def raw_argument(argument: Any) -> Any:
    """Replace tensors, in tuples, too, by their addresses; return other values as they are."""
    if isinstance(argument, tuple):
        return tuple(raw_argument(one) for one in argument)
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def supports_dependent_launch(device: torch.device) -> bool:
    """Return whether GPU and Triton support programmatic dependent launch."""
    is_known = all(name in CUDAOptions.__dataclass_fields__ for name in DEPENDENT_LAUNCH)
    return is_known and torch.cuda.get_device_properties(device).major >= 9


class PackedLaunch:
    """A compiled kernel with a fixed grid, called as `launch(stream)`.

    An argument is a number, a tensor, a stand-in whose `address` may change between calls (kernel_calls/call.py), a
    descriptor of a tensor or stand-in, or a tuple of these without descriptors. Tensors are kept alive: the kernel gets
    their addresses alone.
    """

    def __init__(self, compiled: Any, programs: int, arguments: list[Any]) -> None:
        self._compiled, self._programs, self._kept_alive = compiled, programs, arguments
        self._arguments = [raw_argument(one) for one in arguments]
        self._quick = quick_launch(compiled)
        self._tracked: list[tuple[int, Any, Any]] = []
        self._packed: list[Any] = []
        self._addresses: list[int] = []
        if self._quick is not None:
            self._pack()
            self._start, self._head = self._quick.launch, self._quick.head
            self._tail: list[Any] = self._packed if self._quick.is_flat else [self._packed]

    @property
    def is_quick(self) -> bool:
        """Return whether it calls Triton's C launcher, not the wrapper that encodes all descriptors at each launch."""
        return self._quick is not None

    def __call__(self, stream: int) -> None:
        """Launch on a stream; encode arguments whose address has changed."""
        if self._quick is None:
            self._launch_wrapped(stream)
            return
        packed = self._packed
        for index, (position, source, encode) in enumerate(self._tracked):
            if source.address != self._addresses[index]:
                self._addresses[index] = source.address
                packed[position] = encode()
        self._start(self._programs, 1, 1, stream, *self._head, *self._tail)

    def _launch_wrapped(self, stream: int) -> None:
        """Launch by Triton's own wrapper: grid, stream, function, metadata, launch metadata, two hooks, arguments."""
        compiled = self._compiled
        function, metadata = compiled.function, compiled.packed_metadata
        compiled.run(self._programs, 1, 1, stream, function, metadata, None, None, None, *self._arguments)

    def _pack(self) -> None:
        """Expand descriptors as the C launcher requires; track the stand-ins, whose address changes with each call.

        Tensors are plain addresses already (`raw_argument`): only a stand-in has an `address`.
        """
        described = iter(getattr(self._compiled.metadata, "tensordesc_meta", None) or ())
        for argument in self._arguments:
            position = len(self._packed)
            if hasattr(argument, "block_shape"):
                encode = _Encoder(argument, next(described))
                self._packed += encoded(argument, encode.metadata)
                if hasattr(argument.base, "address"):
                    self._track(position, argument.base, encode)
            elif isinstance(argument, tuple):
                self._packed.append(addresses_of(argument))
                for part in argument:
                    for source in part if isinstance(part, tuple) else (part,):
                        if hasattr(source, "address"):
                            self._track(position, source, partial(addresses_of, argument))
            elif hasattr(argument, "address"):
                self._packed.append(argument.address)
                self._track(position, argument, argument.data_ptr)
            else:
                self._packed.append(argument)

    def _track(self, position: int, source: Any, encode: Callable[[], Any]) -> None:
        self._tracked.append((position, source, encode))
        self._addresses.append(source.address)


def addresses_of(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a tuple with the present addresses in place of stand-ins, in tuples within it too."""
    present = []
    for part in parts:
        present.append(addresses_of(part) if isinstance(part, tuple) else getattr(part, "address", part))
    return tuple(present)


class _Encoder:
    """Encodes a descriptor's tensor map for its tensor's current address, with a cache: addresses recur."""

    def __init__(self, descriptor: TensorDescriptor, metadata: Any) -> None:
        self._descriptor, self.metadata = descriptor, metadata
        self._encoded: dict[int, Any] = {}  # address -> tensor map

    def __call__(self) -> Any:
        address = self._descriptor.base.data_ptr()
        known = self._encoded.get(address)
        if known is None:
            if len(self._encoded) >= MOST_ENCODED:
                self._encoded.clear()
            known = self._encoded[address] = encoded(self._descriptor, self.metadata)[0]
        return known


HOPPER = 9


def launch_check(device: torch.device) -> bool:
    """Compile a small kernel anew and load it, without a launch. Return whether its launches bypass Triton's wrapper.

    Raises KernelUnavailable with the compiler's message, or with the name that the Hopper kernel cannot import.
    """
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        launch = Launch(notify_call((), device))
    if torch.cuda.get_device_properties(device).major == HOPPER:
        load("hopper kernel")
    return isinstance(launch.start, PackedLaunch) and launch.start.is_quick


# Side streams use stream waits, which hold no SM. For most of these signals some kernel waits, too; for the others the
# caller's stream waits at the end of the call, so that a deadline covers them.

Enqueue = Callable[[int], None]


class DeviceSignals(NamedTuple):
    """Adjacent signals `[low, high)` of a slot, each of which must reach `full`."""

    low: int
    high: int
    full: int


class PlanWaits:
    """The waits of one rank's caller's stream, bound to a slot."""

    def __init__(self, plan: Plan, rank: int, layout: SlotLayout, protocol: SignalWords) -> None:
        self._plan, self._rank, self._layout, self._protocol = plan, rank, layout, protocol

    def of(self, operation: Operation) -> Enqueue:
        """Return a function that enqueues the waits of an operation on a stream."""
        queue = [other.name for other in self._plan.schedule.of_rank(self._rank) if other.queue == operation.queue]
        return self._bind(operation.all_waits, queue.index(operation.name))

    def at_end(self) -> tuple[Callable[..., None], ...]:
        """Return the last action of a call, if there is one: waits for signals that no kernel waits for."""
        uncovered = waits_without_deadline(self._plan, self._rank)
        if not uncovered:
            return ()
        wait = self._bind(uncovered, QUEUE_OPERATION.value)
        return (lambda stream, *arguments: wait(stream.cuda_stream),)

    def _bind(self, waits: Iterable[Wait], operation: int) -> Enqueue:
        counts = {self._layout.signal(wait.pad, at): wait.count for wait in waits for at in range(*wait.signals)}
        return bind_waits(counts, operation, self._layout.signals, self._protocol)


def bind_waits(counts: Mapping[int, int], operation: int, signals: int, protocol: SignalWords) -> Enqueue:
    """Return a function that enqueues waits on a stream. counts: number of a signal in the slot -> count. signals: of
    the slot. operation: for the report of a timeout."""
    ranges = pack_waits(merge_adjacent(counts))
    starts = [Launch(wait_call(protocol, one, operation, signals)).start for one in ranges]

    def enqueue(stream: int) -> None:
        for start in starts:
            start(stream)

    return enqueue


def merge_adjacent(counts: Mapping[int, int]) -> list[DeviceSignals]:
    """Merge signals with consecutive numbers and equal counts."""
    merged: list[DeviceSignals] = []
    for number in sorted(counts):
        last = merged[-1] if merged else None
        if last is not None and (last.high, last.full) == (number, counts[number]):
            merged[-1] = last._replace(high=number + 1)
        else:
            merged.append(DeviceSignals(number, number + 1, counts[number]))
    return merged


def pack_waits(ranges: Iterable[DeviceSignals]) -> Iterator[tuple[int, int, int, int, int]]:
    """Pack ranges into few waits (low, high, full, also, also_full): each has a range and a single signal, or none."""
    remaining = sorted(ranges, key=lambda signals: signals.high - signals.low)
    while remaining:
        longest = remaining.pop()
        has_single = bool(remaining) and remaining[0].high - remaining[0].low == 1
        also = remaining.pop(0) if has_single else DeviceSignals(NO_SIGNAL, NO_SIGNAL, 0)
        yield (*longest, also.low, also.full)
