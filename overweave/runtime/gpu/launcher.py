"""Launches: a kernel compiled for fixed shapes, loaded, and started with a few microseconds of host time.

A `Launch` never compiles after it is made. Tensors that stay the same from call to call are bound as plain addresses;
what moves is bound through a `Moving` (kernel_calls/call.py), which descriptors and arguments read at each launch.

A launch through Triton's public face encodes every tensor descriptor anew, which is most of its host time. Here, in the
one place that knows the insides of Triton's launcher, a descriptor is encoded again only when its tensor has moved.
Where a Triton version has other insides than those of 3.6, the public face is used: slower, never wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.nvidia.compiler import CUDAOptions
from triton.tools.tensor_descriptor import TensorDescriptor

from overweave.runtime.kernel_calls.call import EARLY, KernelCall

try:
    from triton.backends.nvidia.driver import make_tensordesc_arg
except ImportError:
    make_tensordesc_arg = None

MOST_ENCODED = 64  # tensor maps of 128 bytes that a descriptor keeps


class Launch:
    """A compiled kernel with its grid, arguments and options, loaded and ready: `start` launches it on a stream.

    most: programs that run at once, where the kernel's claim tiles. programs: how many it has.
    """

    def __init__(self, call: KernelCall, most: int | None = None) -> None:
        self.programs = call.programs if most is None else max(1, min(call.programs, most))
        self.compiled = call.kernel.warmup(*call.arguments, grid=(self.programs,), **call.options)
        self.compiled._init_handles()
        self.start: Callable[[int], None] = PackedLaunch(self.compiled, self.programs, call.arguments)


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
        self._raw = _raw_launcher(compiled)
        self._depends = bool(getattr(compiled.metadata, "launch_pdl", False))
        self._moving: list[tuple[int, Any, Any]] = []
        self._packed: list[Any] = []
        self._seen: list[int] = []
        if self._raw is not None:
            self._pack()

    def __call__(self, stream: int) -> None:
        """Launches on a stream."""
        compiled, programs = self._compiled, self._programs
        function, metadata = compiled.function, compiled.packed_metadata
        if self._raw is None:
            compiled.run(programs, 1, 1, stream, function, metadata, None, None, None, *self._arguments)
            return
        packed = self._packed
        for index, (place, source, encode) in enumerate(self._moving):
            if source.address != self._seen[index]:
                self._seen[index] = source.address
                packed[place] = encode()
        # stream, function, cooperative, dependent launch, two scratch buffers, metadata, hooks
        self._raw(
            programs, 1, 1, stream, function, False, self._depends, None, None, metadata, None, None, None, *packed
        )

    def _pack(self) -> None:
        """Expands descriptors as the launcher wants them and notes where addresses may change."""
        described = iter(getattr(self._compiled.metadata, "tensordesc_meta", None) or ())
        for argument in self._arguments:
            place = len(self._packed)
            if hasattr(argument, "block_shape"):
                encode = _Encoder(argument, next(described))
                self._packed += make_tensordesc_arg(argument, encode.metadata)
                if hasattr(argument.base, "address"):
                    self._watch(place, argument.base, encode)
            elif isinstance(argument, tuple):
                parts = [getattr(part, "address", part) for part in argument]
                self._packed.append(tuple(parts))
                for at, part in enumerate(argument):
                    if hasattr(part, "address"):
                        self._watch(place, part, _Part(parts, at, part))
            elif hasattr(argument, "address"):
                self._packed.append(argument.address)
                self._watch(place, argument, argument.data_ptr)
            else:
                self._packed.append(argument)

    def _watch(self, place: int, source: Any, encode: Callable[[], Any]) -> None:
        self._moving.append((place, source, encode))
        self._seen.append(source.address)


class _Part:
    """A part of a tuple that has moved: the tuple as it is now. parts: those of one tuple, which share the list."""

    def __init__(self, parts: list[Any], at: int, source: Any) -> None:
        self._parts, self._at, self._source = parts, at, source

    def __call__(self) -> tuple[Any, ...]:
        self._parts[self._at] = self._source.address
        return tuple(self._parts)


class _Encoder:
    """Encodes a descriptor's tensor map for where its tensor lies now, and remembers it: tensors come back."""

    def __init__(self, descriptor: TensorDescriptor, metadata: Any) -> None:
        self._descriptor, self.metadata = descriptor, metadata
        self._encoded: dict[int, Any] = {}

    def __call__(self) -> Any:
        address = self._descriptor.base.data_ptr()
        encoded = self._encoded.get(address)
        if encoded is None:
            if len(self._encoded) >= MOST_ENCODED:
                self._encoded.clear()
            encoded = self._encoded[address] = make_tensordesc_arg(self._descriptor, self.metadata)[0]
        return encoded


def _raw_launcher(compiled: Any) -> Callable[..., None] | None:
    """The C launcher behind the wrapper that encodes descriptors, or None where Triton is built differently."""
    launch = getattr(compiled.run, "launch", None)
    if launch is None or make_tensordesc_arg is None:
        return None
    if getattr(compiled.run, "global_scratch_size", 1) or getattr(compiled.run, "profile_scratch_size", 1):
        return None
    if not inspect.isfunction(launch):
        return launch  # type: ignore[no-any-return]
    inner = inspect.getclosurevars(launch).nonlocals.get("launcher")
    has_metadata = getattr(compiled.metadata, "tensordesc_meta", None)
    return inner if callable(inner) and has_metadata else None
