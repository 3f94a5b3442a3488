"""What of hand-fused kernels on GPUs needs no GPU: which addresses copies, flags and waits name, in which stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overweave.lang.arguments import Channel, SymmetricTensor
from overweave.lang.mapping import TileChannel, Tiles
from overweave.memory.cuda import driver
from overweave.runtime.gpu import handwritten as handwritten_gpu
from overweave.runtime.handwritten import (
    MAIN,
    ChannelArgument,
    Declared,
    SymmetricBuffer,
    TensorArgument,
    TileLaunch,
    TileNotify,
    TileTask,
    TileWait,
)

RANK, BASES = 1, (1 << 20, 2 << 20, 3 << 20)
TILES = Tiles(12, 8, 2, 8, 3)
DECLARED = Declared(
    {"a": SymmetricBuffer(12, 8, torch.bfloat16), "b": SymmetricBuffer(4, 8, torch.float32, is_shard=True)},
    {"first": TileChannel(TILES, channels=2), "second": TileChannel(TILES, has_peers=True)},
)


class FakeHeap:
    """Memory on the host that claims to lie elsewhere."""

    addresses = BASES

    def __init__(self, size_bytes: int) -> None:
        self.memory = torch.zeros(size_bytes, dtype=torch.uint8)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = dtype.itemsize * torch.Size(shape).numel()
        return self.memory[offset : offset + size].view(dtype).view(shape)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the driver was asked to do."""
    calls: list[tuple[Any, ...]] = []
    for name in ("copy", "write_value", "wait_value"):
        monkeypatch.setattr(driver, name, lambda *given, name=name: calls.append((name, *given)))
    monkeypatch.setattr(
        handwritten_gpu,
        "bind_waits",
        lambda counts, *told: lambda stream: calls.append(("wait_kernel", stream, counts, *told[:2], told[2][-1])),
    )
    monkeypatch.setattr(handwritten_gpu, "KernelLaunch", lambda call: SimpleNamespace(start=lambda stream: None))
    return calls


@pytest.fixture
def slot(done: list[tuple[Any, ...]]) -> Any:
    layout = DECLARED.lay_out()
    words = SimpleNamespace(tensor=torch.zeros(512, dtype=torch.uint8), addresses=(0, 1, 2))
    words.view = lambda offset, shape, dtype: words.tensor.view(dtype)[: shape[0]]
    workspace: Any = SimpleNamespace(
        group=SimpleNamespace(rank=RANK, world_size=3),
        device=torch.device("cpu"),
        words=words,
        state=torch.zeros(8, dtype=torch.int64),
        claims=torch.zeros(3, dtype=torch.int32),
        limits=torch.zeros(5, dtype=torch.int64),
    )
    workspace.lease = lambda layout: FakeHeap(layout.size_bytes)
    return handwritten_gpu._BoundProgram(DECLARED, layout, workspace)


def test_a_kernel_is_given_the_channel_and_the_tensor_of_the_slot(slot: Any):
    table = torch.zeros(3, 5, dtype=torch.int32)
    launch = TileLaunch(None, (1,), (ChannelArgument("second", consumer_table=table), TensorArgument("b"), 3), {"x": 1})
    (channel, tensor, number), options = slot.arguments.of(launch)
    assert isinstance(channel, Channel)
    assert isinstance(tensor, SymmetricTensor)
    layout = DECLARED.lay_out()
    first = layout.signal_offset("second", 0)
    assert channel.peers.tolist() == [base + first for base in BASES]
    assert channel.signals.data_ptr() == slot._heap.memory.data_ptr() + first
    assert (channel.number, channel.rank, channel.producer_table) == (1, RANK, None)
    assert channel.consumer_table is table
    assert tensor.addresses.tolist() == [base + layout.buffers["b"] for base in BASES]
    assert tensor.own.data_ptr() == slot._heap.memory.data_ptr() + layout.buffers["b"]
    assert (number, options) == (3, {"x": 1})


def test_what_decides_how_a_kernel_is_compiled():
    base = torch.zeros(64, dtype=torch.int32)
    key = handwritten_gpu._specialization_key
    assert key((base, 1)) == key((torch.ones(8, dtype=torch.int32), 1))
    assert key(base) != key(base[1:])
    assert key(base) != key(base.float())
    assert key((base, 1)) != key((base, 2))
    assert hash(key((base, None, ("num_warps", 8)))) == hash(key((base, None, ("num_warps", 8))))


def test_signals_within_a_rank_are_events_where_no_kernel_waits_for_them_and_none_is_awaited_first():
    steps: list[Any] = [
        ("a", TileWait("early", ((0, 1),))),
        *((MAIN, TileNotify(name, 0, RANK)) for name in ("early", "launched", "arriving", "queued")),
        (MAIN, TileNotify("queued", 1, 0)),
        (MAIN, TileLaunch(None, (1,), (ChannelArgument("launched"),), {})),
        (MAIN, TileTask("task", lambda own, channel: None, (), "arriving")),
    ]
    assert handwritten_gpu._local_notifies(steps, RANK) == {TileNotify("queued", 0, RANK)}


def test_a_notify_in_the_callers_stream_is_a_kernels_once_it_is_loaded(slot: Any, done: list[tuple[Any, ...]]):
    stream: Any = SimpleNamespace(cuda_stream=7)
    action = TileNotify("first", 1, 2)
    slot.notify(stream, action)
    address = BASES[2] + DECLARED.lay_out().signal_offset("first", 1)
    assert done == [("write_value", 7, address, 1)]
    slot.load_notify(action)
    slot.notify(stream, action)
    assert len(done) == 1
