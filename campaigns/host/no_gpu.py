"""A GPU that is not there, for what the host does on the way to it: plans are bound and called, nothing is computed.

Only what would leave Python is replaced: Triton's compiler and launcher, the driver, streams, events and graphs. All of
overweave's own code runs, on tensors of the CPU. Peers are silent, and alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import repeat
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from overweave.compat.triton_names import QuickLaunch
from overweave.memory.board import records
from overweave.memory.board.board import Board
from overweave.memory.board.records import Records, SharedFile
from overweave.memory.cuda import driver, streams
from overweave.memory.cuda.streams import Chain
from overweave.memory.cuda.workspace import Workspace
from overweave.memory.group import Group
from overweave.memory.outside_modes import Make
from overweave.ops.call import prepare
from overweave.runtime.gpu import launcher
from overweave.runtime.gpu.launcher import PackedLaunch
from overweave.runtime.kernel_calls.call import KernelCall
from overweave.runtime.library import calls as library_calls

FILE = __file__  # calls of functions of this file stand for calls into C
COLLECTIVES = "_allgather_base", "_reduce_scatter_base", "allreduce", "alltoall_base"
GPU = SimpleNamespace(multi_processor_count=132, major=9, name="NVIDIA H200")


def nothing(*given: Any, **named: Any) -> None:
    """What the driver does here."""


class Stream:
    """A stream or an event: it takes what is enqueued."""

    cuda_stream = 7

    def wait_event(self, event: Any) -> None: ...

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return True


class Graph:
    """A captured graph."""

    replayed = 0  # how often, any of them

    def replay(self) -> None:
        Graph.replayed += 1


class Driver:
    """The driver's functions, which all succeed, and the names of its types."""

    def __init__(self) -> None:
        self._real: Any = vars(driver)["driver"]

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "cu" and name[2].isupper():
            outcome = (self._real.CUresult.CUDA_SUCCESS, 0)
            found: Any = lambda *given: outcome  # noqa: E731
        else:
            found = getattr(self._real, name)
        setattr(self, name, found)
        return found


class HostHeap:
    """Symmetric memory on the host."""

    def __init__(self, size_bytes: int, ranks: int) -> None:
        self._memory = torch.zeros(size_bytes, dtype=torch.uint8)
        self.addresses = (self._memory.data_ptr(),) * ranks

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._memory[offset : offset + dtype.itemsize * torch.Size(shape).numel()].view(dtype).view(shape)


class HostWorkspace(Workspace):
    """A workspace in host memory: calls enter and leave it as they do on a GPU."""

    def __init__(self, group: Group) -> None:
        self.group, self.device = group, torch.device("cpu")
        words = SimpleNamespace(tensor=torch.zeros(4096, dtype=torch.uint8), addresses=tuple(range(group.world_size)))
        words.view = lambda offset, shape, dtype: words.tensor.view(dtype)[: shape[0]]
        self.words: Any = words
        self.state, self.limits = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
        self.claims, self.report = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
        self._report = memoryview(self.report.numpy())  # type: ignore[arg-type]
        self._watcher: Any = SimpleNamespace(failure=None)
        self.calls = 0
        self._last_call: Any = Stream()
        self._record_last: Any = nothing
        self.chain = Chain(self.device)
        self.chain.streams[0] = Stream()  # type: ignore[assignment]
        self.current_stream = self.chain.streams.current
        self.captures: Any = SimpleNamespace(graph=lambda enqueue: Graph())

    def lease(self, layout: Any) -> Any:
        return HostHeap(layout.size_bytes, self.group.world_size)

    def packed_space(self, half_bytes: int) -> Any:
        numbers = torch.zeros(2, dtype=torch.int64)
        product = lambda shape, dtype: torch.zeros(shape, dtype=dtype)  # noqa: E731
        return SimpleNamespace(half_bytes=half_bytes, spaces=numbers, state=numbers, product=product)

    def stream(self, queue: str) -> Any:
        return Stream()


@dataclass(slots=True)
class _Block:
    """Memory, and what was given out of it last."""

    memory: torch.Tensor
    given: Callable[[], torch.Tensor | None] = nothing


class Blocks:
    """An allocator that gives out first what came back first, as a GPU's does in a loop; a host's makes no promise."""

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, int], torch.dtype], list[_Block]] = {}

    def empty_factory(self, device: torch.device) -> Make:
        """What makes a matrix (memory/outside_modes.py)."""
        return self._make

    def _make(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        blocks = self._made.setdefault((shape, dtype), [])
        block = next((each for each in blocks if each.given() is None), None)
        if block is None:
            blocks.append(block := _Block(torch.empty(shape, dtype=dtype)))
        made = block.memory.detach()
        block.given = weakref.ref(made)
        return made

    def product(self, x: torch.Tensor, w: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Where torch.mm leaves its product."""
        return self._make((x.shape[0], w.shape[1]), x.dtype) if out is None else out


def _init_launch(self: Any, call: KernelCall, most: int | None = None) -> None:
    fixed = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in call.arguments]
    metadata = SimpleNamespace(tensordesc_meta=repeat(None))
    self._kept_alive, self.programs = call.arguments, call.programs
    self.start = PackedLaunch(SimpleNamespace(function=0, packed_metadata=0, metadata=metadata), call.programs, fixed)


def _is_alive(self: Records, rank: int) -> bool:
    _IS_ALIVE(self, rank)
    return True


_IS_ALIVE = Records.is_alive


@contextmanager
def group_without_gpus(ranks: int) -> Iterator[Group]:
    """This process as the first rank of a group whose plans are bound as on GPUs. It must be in a world of its own."""
    world = dist.group.WORLD
    assert world is not None
    group = Group(world.group_name, 0, ranks, world, torch.device("cpu"))
    own = Board(group, SharedFile.create(ranks * records.RECORD_WORDS * 8))
    opened: list[HostWorkspace] = []
    blocks = Blocks()

    def workspace_of(group: Group, device: torch.device) -> HostWorkspace:
        if not opened:
            opened.append(HostWorkspace(group))
            own.is_watched = True
        return opened[0]

    with ExitStack() as stack:
        for where, name, stand_in in (
            (Board, "agree", Board.post),
            (Board, "of", lambda group: own),
            (Workspace, "of", workspace_of),
            (Workspace, "existing", lambda group: opened[0] if opened else None),
            (prepare, "_bind", prepare._bind_aligned),
            *((where, "empty_factory", blocks.empty_factory) for where in (prepare, library_calls)),
            (Records, "is_alive", _is_alive),
            (driver, "driver", Driver()),
            (launcher.Launch, "__init__", _init_launch),
            (launcher, "quick_launch", lambda compiled: QuickLaunch(nothing, (), True)),
            (launcher, "encoded", lambda argument, metadata: [0]),
            (torch.cuda, "Event", Stream),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "get_device_properties", lambda device: GPU),
            (streams, "cuda_getCurrentRawStream", lambda index: 0),
            *((dist.ProcessGroup, name, nothing) for name in COLLECTIVES),
            (torch, "mm", blocks.product),
        ):
            stack.enter_context(patch.object(where, name, stand_in, create=True))
        yield group
