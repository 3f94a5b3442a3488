"""A GPU that is not there: kernels compile for it, and its driver only writes down what it is asked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import CompiledKernel

from overweave.ir.launch.streams import waits_without_deadline
from overweave.ir.plan import LIBRARY, Plan
from overweave.memory.cuda import driver
from overweave.memory.heap import HALVES, PackedSpace
from overweave.memory.layout import lay_out
from overweave.memory.split_k import SharedShares
from overweave.runtime.gpu import launcher
from overweave.runtime.gpu.launcher import merge_adjacent, pack_waits
from tools.aot import HOPPER

SIDE_STREAM: Any = SimpleNamespace(cuda_stream=5, wait_event=lambda event: None)
CALLER: Any = SimpleNamespace(cuda_stream=7, wait_event=lambda event: None)
SHARED_BYTES = 232448  # that a block may have
_UNASSEMBLED = TemporaryDirectory(prefix="overweave-")


class Launched(str):
    """The name of a kernel that was launched, where it found its tensors, and whether it may start early."""

    addresses: set[Any]
    is_early: bool


class Driver:
    """What Triton asks of a GPU before it compiles."""

    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": SHARED_BYTES})

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return HOPPER


class HostHeap:
    """A rank's memory on the host, that of its peers beside it."""

    def __init__(self, size_bytes: int, ranks: int = 2, rank: int = 0) -> None:
        self.memory = torch.zeros(ranks * size_bytes, dtype=torch.uint8)
        self.addresses = tuple(self.memory.data_ptr() + rank * size_bytes for rank in range(ranks))
        self.tensor = self.memory[rank * size_bytes :][:size_bytes]

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = dtype.itemsize * torch.Size(shape).numel()
        return self.tensor[offset : offset + size].view(dtype).view(shape)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """The kernels launched so far."""
    calls: list[Launched] = []

    def pack(compiled: Any, programs: int, arguments: list[Any]) -> Any:
        assert programs >= 1
        check_maps(compiled.asm["ptx"])

        def launch(stream: int) -> None:
            calls.append(Launched(compiled.metadata.name))
            calls[-1].addresses = {address_of(one) for one in parts_of(arguments)}
            calls[-1].is_early = compiled.metadata.launch_pdl

        return launch

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda self: None)
    # The lint's tests assemble kernels; what ends at PTX must not lie among those.
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda self, *given: b"")
    monkeypatch.setattr(triton.knobs.cache, "dir", _UNASSEMBLED.name)
    monkeypatch.setattr(launcher, "PackedLaunch", pack)
    properties = SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    for name in ("copy", "write_value", "wait_value"):
        monkeypatch.setattr(driver, name, lambda *given: None)
    return calls


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(stream, address) of each wait without a deadline."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(driver, "wait_value", lambda stream, address, value: found.append((stream, address)))
    return found


def check_waits(plan: Plan, space: Any, launched: Sequence[str], waited: list[tuple[int, int]]) -> int:
    """How many kernels wait in the caller's stream, which must be as many as it needs. Without a deadline it waits for
    pushes of its own rank."""
    own = {address for stream, address in waited if stream == CALLER.cuda_stream}
    assert own <= {space.claims[2:].data_ptr()}
    layout, rank = lay_out(plan.schedule, plan.realization.dtype), space.group.rank
    by_library = (one for one in plan.schedule.of_rank(rank) if plan.realization.engine_of(one.queue) == LIBRARY)
    needed = 0
    for waits in (*(one.all_waits for one in by_library), waits_without_deadline(plan, rank)):
        counts = {layout.signal(wait.pad, at): wait.count for wait in waits for at in range(*wait.signals)}
        needed += len(list(pack_waits(merge_adjacent(counts))))
    assert launched.count("wait_kernel") == needed
    return needed


def check_maps(text: str) -> None:
    """A tensor map that a kernel fetches early is one: by its name alone it may be any parameter."""
    for name in re.findall(r"prefetch\.param\.tensormap \[(\w+)\]", text):
        assert re.search(rf"\.param \.align 64 \.b8 {name}\[128\]", text), f"{name} is no tensor map"


def parts_of(arguments: Sequence[Any]) -> Iterator[Any]:
    """Arguments, of tuples their parts."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from parts_of(argument)
        else:
            yield argument


def address_of(argument: Any) -> Any:
    """Where a launch finds an argument that is a tensor; a number as it is."""
    argument = getattr(argument, "base", argument)
    return argument.data_ptr() if hasattr(argument, "data_ptr") else argument


def drain() -> None:
    """No call is in flight."""


def workspace(rank: int = 0, ranks: int = 2) -> Any:
    words = SimpleNamespace(tensor=torch.zeros(1024, dtype=torch.uint8), addresses=tuple(range(ranks)))
    words.view = lambda offset, shape, dtype: words.tensor.view(dtype)[: shape[0]]
    return SimpleNamespace(
        group=SimpleNamespace(rank=rank, world_size=ranks),
        device=torch.device("cpu"),
        chain=SimpleNamespace(lock=nullcontext()),
        drain=drain,
        words=words,
        state=torch.zeros(8, dtype=torch.int64),
        claims=torch.zeros(8, dtype=torch.int32),
        shares=SharedShares(torch.device("cpu")),
        limits=torch.zeros(8, dtype=torch.int64),
        stream=lambda queue: SIDE_STREAM,
        current_stream=lambda: CALLER,
        captured_runs=[],
        lease=lambda layout: HostHeap(layout.size_bytes, ranks, rank),
        packed_space=lambda half: PackedSpace(HostHeap(HALVES * half, ranks, rank), torch.device("cpu"), half),
    )
