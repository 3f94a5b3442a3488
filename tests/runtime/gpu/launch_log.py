"""What a call on a GPU enqueues, as text: every launch with its arguments, and every wait, write, copy and event.

Nothing is compiled and nothing runs. Addresses are shown by the memory that they lie in, tables by a digest of what
they say, so that the text is the same in every process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from hashlib import blake2b
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from triton.runtime.jit import JITFunction, KernelInterface

from overweave.compat.triton_names import COMPILE_OPTIONS
from overweave.memory.cuda import driver
from overweave.memory.cuda.copy_engine import CopyQueue
from overweave.memory.split_k import SharedShares
from overweave.runtime.gpu import launcher
from tests.runtime.without_gpu import Driver, HostHeap

SMS = 132
Text = list[str]
UNKNOWN = "another place"
LONG_NUMBER = re.compile(r"\b\d{11,}\b")


class Stream:
    """A stream that writes down what it waits for."""

    def __init__(self, text: Text, name: str) -> None:
        self._text, self.cuda_stream = text, name

    def wait_event(self, event: Any) -> None:
        self._text.append(f"{self.cuda_stream}: behind {event.recorded}")


class Event:
    """An event that knows on which stream it was recorded last."""

    recorded = "nothing"

    def __init__(self, **options: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        self.recorded = stream.cuda_stream


class Memory:
    """Names of the memory that a call knows."""

    def __init__(self) -> None:
        self._known: list[tuple[int, int, str]] = []
        self._kept: list[object] = []  # its place is nobody else's

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._kept.append(tensor)
        size = tensor.untyped_storage().nbytes()
        self._known.append((tensor.untyped_storage().data_ptr(), max(size, 1), name))

    def add_heap(self, heap: HostHeap) -> None:
        self._kept.append(heap)
        size = heap.tensor.numel()
        self._known += [(base, size, f"slot of {rank}") for rank, base in enumerate(heap.addresses)]

    def of(self, number: int) -> str:
        """A number, or where it points."""
        for start, size, name in self._known:
            if start <= number < start + size:
                return f"{name}+{number - start}" if number > start else name
        return str(number) if abs(number) < 1 << 32 else UNKNOWN

    def said(self, value: Any) -> str:
        """An argument."""
        if isinstance(value, bool | float | None):
            return str(value)
        if isinstance(value, int):
            return self.of(value)
        if isinstance(value, str):
            return value if len(value) < 24 else f"text {_digest(value)}"
        if isinstance(value, tuple):
            return f"({', '.join(map(self.said, value))})"
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if hasattr(value, "block_shape"):
            layout = getattr(value, "layout", None)
            seen = (tuple(value.shape), tuple(value.strides), tuple(value.block_shape), str(layout))
            return (
                f"map({self.said(value.base)}, {tuple(value.shape)} by {tuple(value.block_shape)} {_digest(str(seen))})"
            )
        if hasattr(value, "data_ptr"):
            return f"{self.of(value.data_ptr())} {str(value.dtype).removeprefix('torch.')}"
        # A digest of device functions is not the same for another Triton.
        return LONG_NUMBER.sub("a digest", str(getattr(value, "value", value)))

    def _tensor(self, tensor: torch.Tensor) -> str:
        kind = f"{tensor.dtype} {list(tensor.shape)}".replace("torch.", "")
        place = self.of(tensor.data_ptr())
        if place != UNKNOWN:
            return f"{place} {str(tensor.dtype).removeprefix('torch.')}"
        if tensor.dtype.is_floating_point:
            return kind
        return f"{kind} {_digest(' '.join(self.of(number) for number in tensor.flatten().tolist()))}"


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=4).hexdigest()


class LaunchLog:
    """The text so far, and the workspace of one rank whose calls write it."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.text: Text = []
        self.current = "caller"  # the stream that libraries see
        self.memory = Memory()
        self.streams: dict[str, Stream] = {}
        self.workspace = self._workspace(rank, ranks)

    def tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Names of the caller's tensors."""
        for name, tensor in tensors.items():
            self.memory.add(name, tensor)

    def stream(self, name: str) -> Stream:
        return self.streams.setdefault(name, Stream(self.text, name))

    def _workspace(self, rank: int, ranks: int) -> Any:
        words = SimpleNamespace(tensor=torch.zeros((1 + ranks) * 128, dtype=torch.uint8), addresses=tuple(range(ranks)))
        words.view = lambda offset, shape, dtype: words.tensor.view(dtype)[: shape[0]]
        made: dict[str, Any] = {
            "words": words,
            "state": torch.zeros(3, dtype=torch.int64),
            "claims": torch.zeros(4, dtype=torch.int32),
            "limits": torch.zeros(2 + ranks, dtype=torch.int64),
        }
        for name, one in made.items():
            self.memory.add(name, getattr(one, "tensor", one))
        group = SimpleNamespace(rank=rank, world_size=ranks, device=torch.device("cpu"), process_group=None)
        return SimpleNamespace(
            **made,
            group=group,
            device=torch.device("cpu"),
            chain=SimpleNamespace(lock=nullcontext()),
            drain=lambda: None,
            shares=SharedShares(torch.device("cpu")),
            stream=self.stream,
            current_stream=lambda: self.stream("caller"),
            captured_runs=[],
            board=SimpleNamespace(post=lambda signature: None),
            lease=lambda layout: self._heap(layout.size_bytes, ranks, rank),
            packed_space=lambda half_bytes: self._packed(half_bytes, ranks),
        )

    def _heap(self, size_bytes: int, ranks: int, rank: int) -> HostHeap:
        heap = HostHeap(size_bytes, ranks, rank)
        self.memory.add_heap(heap)
        return heap

    def _packed(self, half_bytes: int, ranks: int) -> Any:
        space = self._heap(half_bytes, ranks, 0)
        state, product = torch.zeros(1, dtype=torch.int64), torch.zeros(half_bytes, dtype=torch.uint8)
        self.memory.add("calls", state)
        self.memory.add("product", product)
        return SimpleNamespace(
            half_bytes=half_bytes,
            spaces=torch.tensor(space.addresses),
            state=state,
            product=lambda shape, dtype: product[: shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape),
        )


def _stretches(log: LaunchLog, function: str, most_sms: int) -> Callable[[Any, Any], None]:
    """A library's collective of permuted blocks, which is said."""

    def call(target: Any, source: Any) -> None:
        ends = " to ".join(f"{log.memory.of(part.data_ptr())} [{part.numel()}]" for part in (source, target))
        log.text.append(f"{log.current}: library {function} on {most_sms} SMs of {ends}")

    return call


def _say_stretches(log: LaunchLog, patch: pytest.MonkeyPatch) -> None:
    """Collectives of permuted blocks are said, with the SMs that they may take."""
    said = {name: partial(_stretches, log, name) for name in ("reduce_scatter", "all_reduce", "all_to_all")}
    patch.setattr("overweave.runtime.library.calls.MOVES", said)
    module = "overweave.runtime.library.calls"
    patch.setattr(f"{module}.subgroup", lambda group, ranks, most_sms: SimpleNamespace(process_group=most_sms))


@contextmanager
def logged(rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchLog]:
    """A rank of a GPU that is not there. Its calls are as those of a graph that a caller captures."""
    log = LaunchLog(rank, ranks)
    say, memory = log.text.append, log.memory

    def warmup(self: Any, *arguments: Any, grid: Any, **options: Any) -> Any:
        metadata = SimpleNamespace(shared=0, name=self.fn.__name__, options=options)
        return SimpleNamespace(metadata=metadata, arguments=arguments, _init_handles=lambda: None)

    def pack(compiled: Any, programs: int, arguments: list[Any]) -> Callable[[str], None]:
        return lambda stream: said(
            stream, compiled.metadata.name, programs, compiled.arguments, compiled.metadata.options
        )

    def said(stream: str, name: str, programs: Any, arguments: Any, options: Mapping[str, Any]) -> None:
        own = {name: value for name, value in options.items() if name not in COMPILE_OPTIONS}
        how = " ".join(f"{option}={value}" for option, value in own.items() if isinstance(value, int))
        say(f"{stream}: {name}[{programs}] {how}")
        for argument, alike in groupby(map(memory.said, arguments)):
            count = len(list(alike))
            say(f"    {argument}" + f" ({count} times)" * (count > 1))

    def library(operation: Any, *given: Any) -> Callable[[Any], None]:
        return lambda tensors: say(f"{log.current}: library {operation.name}")

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.current = stream.cuda_stream
        yield
        log.current = "caller"

    def by_triton(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **options: said("triton", kernel.fn.__name__, grid, arguments, options)

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "warmup", warmup)
        patch.setattr(KernelInterface, "__getitem__", by_triton)
        patch.setattr(launcher, "PackedLaunch", pack)
        patch.setattr(triton.runtime.driver, "_active", Driver())
        for name in ("bound.call_of", "bound.library_call"):
            patch.setattr(f"overweave.runtime.gpu.{name}", library)
        _say_stretches(log, patch)
        properties = SimpleNamespace(multi_processor_count=SMS, major=9)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(CopyQueue, "prepare", lambda queue, stream, addresses: None)
        patch.setattr(dist, "new_group", lambda *given, **options: None)
        moved = "{}: copy {} to {}, {} rows of {} bytes, pitches {}"
        patch.setattr(driver, "copy", lambda stream, source, target, row_bytes, rows, pitches: say(
            moved.format(stream, memory.of(source), memory.of(target), rows, row_bytes, pitches)))  # fmt: skip
        for name in ("wait", "write"):
            patch.setattr(driver, f"{name}_value", lambda stream, address, value, name=name: say(
                f"{stream}: {name} {memory.of(address)} {value}"))  # fmt: skip
        yield log
