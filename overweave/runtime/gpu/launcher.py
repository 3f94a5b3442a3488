"""Launches: a kernel compiled for fixed shapes, loaded, and started with a few microseconds of host time.

A `Launch` never compiles after it is made. Tensors that stay the same from call to call are bound as plain addresses;
what moves is bound through a `Moving` (kernel_calls/call.py), which descriptors and arguments read at each launch.

A launch through Triton's public face encodes every tensor descriptor anew, which is most of its host time. Here a
descriptor is encoded again only when its tensor has moved, and Triton's C launcher is called (compat/triton_names.py).
Where a Triton has other insides than those that are known, the public face is used: slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from overweave.compat.triton_names import COMPILE_OPTIONS, VERSIONS_CURE, CUDAOptions, encoded, quick_launch
from overweave.errors import KernelUnavailable
from overweave.runtime.kernel_calls.call import EARLY, KernelCall

MOST_SAID = 400  # characters of a compiler's words
MOST_ENCODED = 64  # tensor maps of 128 bytes that a descriptor keeps


class Launch:
    """A compiled kernel with its grid, arguments and options, loaded and ready: `start` launches it on a stream.

    most: programs that run at once, where the kernel's claim tiles. programs: how many it has.
    """

    def __init__(self, call: KernelCall, most: int | None = None) -> None:
        self.programs = call.programs if most is None else max(1, min(call.programs, most))
        self.compiled = compiled_for(call.kernel, call.arguments, (self.programs,), call.options)
        self.start: Callable[[int], None] = PackedLaunch(self.compiled, self.programs, call.arguments)


def compiled_for(kernel: Any, arguments: Any, grid: tuple[int, ...], options: dict[str, Any]) -> Any:
    """A kernel compiled for these arguments, and loaded. Raises KernelUnavailable if Triton or the GPU refuses it."""
    try:
        compiled = kernel.warmup(*arguments, grid=grid, **(COMPILE_OPTIONS | options))
        compiled._init_handles()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler, an assembler or a driver that another machine has: of any type
        found = f"{type(error).__name__}: {error}".strip()[:MOST_SAID]
        raise KernelUnavailable(f"compile {getattr(kernel, '__name__', kernel)}", found, VERSIONS_CURE) from error
    return compiled


def fixed(argument: Any) -> Any:
    """A tensor's address, of tensors in a tuple too; anything else as it is."""
    if isinstance(argument, tuple):
        return tuple(fixed(one) for one in argument)
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def may_start_early(device: torch.device) -> bool:
    """Whether the GPU can start a kernel before the one in front ends, and this Triton can ask it to."""
    is_known = all(name in CUDAOptions.__dataclass_fields__ for name in EARLY)
    return is_known and torch.cuda.get_device_properties(device).major >= 9


class PackedLaunch:
    """A compiled kernel with a fixed grid, called as `launch(stream)`. `arguments` are read anew at each call.

    An argument is a number, a tensor, or an object whose `address` may change between calls (kernel_calls/call.py); a
    descriptor's `base` may be such an object too. Or it is a tuple of these, descriptors aside. A tensor lives as long
    as the launch: the kernel is given its address alone.
    """

    def __init__(self, compiled: Any, programs: int, arguments: list[Any]) -> None:
        self._compiled, self._programs, self._kept_alive = compiled, programs, arguments
        self._arguments = [fixed(one) for one in arguments]
        self._quick = quick_launch(compiled)
        self._moving: list[tuple[int, Any, Any]] = []
        self._packed: list[Any] = []
        self._seen: list[int] = []
        if self._quick is not None:
            self._pack()
            self._start, self._head = self._quick.launch, self._quick.head
            self._tail: list[Any] = self._packed if self._quick.is_flat else [self._packed]

    @property
    def is_quick(self) -> bool:
        """Whether it calls Triton's C launcher, rather than the wrapper that encodes all descriptors anew."""
        return self._quick is not None

    def __call__(self, stream: int) -> None:
        """Launches on a stream."""
        if self._quick is None:
            self._launch_wrapped(stream)
            return
        packed = self._packed
        for index, (place, source, encode) in enumerate(self._moving):
            if source.address != self._seen[index]:
                self._seen[index] = source.address
                packed[place] = encode()
        self._start(self._programs, 1, 1, stream, *self._head, *self._tail)

    def _launch_wrapped(self, stream: int) -> None:
        """By Triton's own wrapper: grid, stream, function, metadata, launch metadata, two hooks, arguments."""
        compiled = self._compiled
        function, metadata = compiled.function, compiled.packed_metadata
        compiled.run(self._programs, 1, 1, stream, function, metadata, None, None, None, *self._arguments)

    def _pack(self) -> None:
        """Expands descriptors as the launcher wants them and notes where addresses may change."""
        described = iter(getattr(self._compiled.metadata, "tensordesc_meta", None) or ())
        for argument in self._arguments:
            place = len(self._packed)
            if hasattr(argument, "block_shape"):
                encode = _Encoder(argument, next(described))
                self._packed += encoded(argument, encode.metadata)
                if hasattr(argument.base, "address"):
                    self._watch(place, argument.base, encode)
            elif isinstance(argument, tuple):
                self._packed.append(addresses_of(argument))
                for part in argument:
                    for source in part if isinstance(part, tuple) else (part,):
                        if hasattr(source, "address"):
                            self._watch(place, source, partial(addresses_of, argument))
            elif hasattr(argument, "address"):
                self._packed.append(argument.address)
                self._watch(place, argument, argument.data_ptr)
            else:
                self._packed.append(argument)

    def _watch(self, place: int, source: Any, encode: Callable[[], Any]) -> None:
        self._moving.append((place, source, encode))
        self._seen.append(source.address)


def addresses_of(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """A tuple as it is now: addresses in place of what moves, in tuples within it too."""
    found = []
    for part in parts:
        found.append(addresses_of(part) if isinstance(part, tuple) else getattr(part, "address", part))
    return tuple(found)


class _Encoder:
    """Encodes a descriptor's tensor map for where its tensor lies now, and remembers it: tensors come back."""

    def __init__(self, descriptor: TensorDescriptor, metadata: Any) -> None:
        self._descriptor, self.metadata = descriptor, metadata
        self._encoded: dict[int, Any] = {}

    def __call__(self) -> Any:
        address = self._descriptor.base.data_ptr()
        known = self._encoded.get(address)
        if known is None:
            if len(self._encoded) >= MOST_ENCODED:
                self._encoded.clear()
            known = self._encoded[address] = encoded(self._descriptor, self.metadata)[0]
        return known
