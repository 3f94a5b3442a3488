"""What of hand-fused kernels on GPUs needs no GPU: which addresses copies, flags and waits name, in which stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overweave.lang.arguments import Channel, SymmetricTensor
from overweave.lang.mapping import TileChannel, Tiles
from overweave.memory.cuda import driver
from overweave.memory.layout import SIGNAL_STRIDE_BYTES
from overweave.runtime.gpu import handwritten as handwritten_gpu
from overweave.runtime.handwritten import (
    MAIN,
    Await,
    ChannelArgument,
    Declared,
    Part,
    Raise,
    SymmetricBuffer,
    TensorArgument,
    TileLaunch,
    TileMove,
)

RANK, BASES = 1, (1 << 20, 2 << 20, 3 << 20)
TILES = Tiles(12, 8, 2, 8, 3)
DECLARED = Declared(
    {"a": SymmetricBuffer(12, 8, torch.bfloat16), "b": SymmetricBuffer(4, 8, torch.float32, is_shard=True)},
    {"first": TileChannel(TILES, channels=2), "second": TileChannel(TILES, has_peers=True)},
)
STREAM: Any = SimpleNamespace(cuda_stream=77)


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


def test_copies_between_ranks_name_the_addresses_of_both(slot: Any, done: list[tuple[Any, ...]]):
    a = DECLARED.lay_out().buffers["a"]
    whole = Part("a", 2, (0, 12), (0, 8))
    slot.enqueue(STREAM, TileMove(whole[4:8], Part("a", RANK, (0, 12), (0, 8))[4:8]))
    assert done.pop() == ("copy", 77, BASES[2] + a + 4 * 16, BASES[1] + a + 4 * 16, 16, 4, (16, 16))
    own = torch.zeros(4, 32, dtype=torch.bfloat16)[:, 8:12]
    slot.enqueue(STREAM, TileMove(own, whole[2:6, 4:8]))
    assert done.pop() == ("copy", 77, own.data_ptr(), BASES[2] + a + 2 * 16 + 8, 8, 4, (64, 16))
    slot.enqueue(STREAM, TileMove(whole[4:4], whole[2:2]))
    assert not done


def test_flags_and_waits_name_counters_in_the_order_of_declaration(slot: Any, done: list[tuple[Any, ...]]):
    slot.enqueue(STREAM, Raise("first", 5, 0))
    slot.enqueue(STREAM, Raise("second", 2, 2))
    slot.enqueue(STREAM, Await("second", ((0, 1), (2, 4))))
    counters = DECLARED.channels["first"].signals
    assert done == [
        ("write_value", 77, BASES[0] + 5 * SIGNAL_STRIDE_BYTES, 1),
        ("write_value", 77, BASES[2] + (counters + 2) * SIGNAL_STRIDE_BYTES, 1),
        ("wait_value", 77, BASES[1] + counters * SIGNAL_STRIDE_BYTES, 1),
        ("wait_value", 77, BASES[1] + (counters + 2) * SIGNAL_STRIDE_BYTES, 4),
    ]


def test_the_callers_stream_waits_by_a_kernel(slot: Any, done: list[tuple[Any, ...]]):
    """Of one more counter than the channel before has."""
    counters = DECLARED.channels["first"].signals
    for _ in range(2):
        slot.wait(STREAM, Await("second", ((0, 1), (2, 4))))
    numbers = -3, DECLARED.lay_out().signals, 3
    assert done == [("wait_kernel", 77, {counters: 1, counters + 2: 4}, *numbers)] * 2
    assert len(slot._waits) == 1


def test_what_queues_beside_wait_for_the_callers_stream_waits_for_at_the_end():
    beside: list[Any] = [
        ("side", Await("second", ((2, 4),))),
        (MAIN, Await("first", ((1, 1),))),
        ("other", Await("second", ((0, 1), (2, 4)))),
        ("side", Raise("first", 5, 0)),
        ("side", Await("first", ((3, 2),))),
    ]
    assert handwritten_gpu._side_stream_waits(beside) == [
        (MAIN, Await("second", ((0, 1), (2, 4)))),
        (MAIN, Await("first", ((3, 2),))),
    ]
    assert handwritten_gpu._side_stream_waits(beside[1:2]) == []


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
