"""The protocol words that every waiting kernel takes, and the calls of the kernels in memory/device/protocol.py."""

from __future__ import annotations

from typing import Protocol

import torch
from triton import next_power_of_2

from overweave.errors import MachineError
from overweave.ir.launch.reach import NO_REACH
from overweave.kernels.arguments import SignalWords
from overweave.memory.device.protocol import begin_kernel, stamp_kernel, tell_kernel, wait_kernel
from overweave.memory.group import Group
from overweave.memory.heap import Heap
from overweave.memory.layout import SIGNAL_STRIDE_WORDS
from overweave.memory.split_k import SharedShares
from overweave.runtime.kernel_calls.call import KernelCall, addresses_tensor

BEGIN_BLOCK = 128


class ProtocolWords(Protocol):
    """What kernels need of a workspace: the words of the protocol, and split-K memory."""

    @property
    def group(self) -> Group: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def words(self) -> Heap: ...

    @property
    def state(self) -> torch.Tensor: ...

    @property
    def claims(self) -> torch.Tensor: ...

    @property
    def limits(self) -> torch.Tensor: ...

    @property
    def shares(self) -> SharedShares: ...


def control_words(workspace: ProtocolWords) -> torch.Tensor:
    """Return this rank's abort word and completed-calls words: int32."""
    return workspace.words.view(0, (workspace.words.tensor.numel() // 4,), torch.int32)


def signal_words(workspace: ProtocolWords, heap: Heap, signals: int) -> SignalWords:
    """Return the arguments of waits and notifies, for so many signals at the start of a heap."""
    own = heap.view(0, (max(signals, 1) * SIGNAL_STRIDE_WORDS,), torch.int32)
    return SignalWords(own, control_words(workspace), workspace.limits, connected_ranks(workspace))


def connected_ranks(workspace: ProtocolWords) -> int:
    """Return the number of ranks that exchange credits and abort each other: all; without peer access, one.

    Then no kernel waits for a peer: NCCL's collectives synchronize the ranks.
    """
    return len({*workspace.words.addresses})


def require_peer_access(workspace: ProtocolWords, what: str) -> None:
    """Raise MachineError without peer access: an access to a peer would go to this rank's own memory."""
    ranks = workspace.group.world_size
    if connected_ranks(workspace) < ranks:
        cure = "Take a plan whose rows the library moves, such as sequential; `overweave doctor` names the GPUs"
        raise MachineError(f"run {what} on {ranks} GPUs", f"they {NO_REACH}", cure)


def prologue_call(workspace: ProtocolWords, protocol: SignalWords, signals: int) -> KernelCall:
    """Return the call of the prologue kernel. signals: that the call uses."""
    words = [workspace.state, protocol.signals, workspace.claims, protocol.words, protocol.limits]
    numbers = [signals, workspace.group.rank % protocol.world_size, protocol.world_size]
    return KernelCall(begin_kernel, [*words, *numbers, BEGIN_BLOCK], {"num_warps": 4})


def wait_call(protocol: SignalWords, wait: tuple[int, ...], operation: int, signals: int) -> KernelCall:
    """Return a wait in the caller's stream. wait: low, high, count, also and also_count of `wait_kernel`. signals:
    that the call uses."""
    numbers = [*wait, operation, signals, protocol.world_size]
    return KernelCall(wait_kernel, [*protocol[:3], *numbers], {"num_warps": 1})


def notify_call(addresses: tuple[int, ...], device: torch.device) -> KernelCall:
    """Return the notify of a cuBLAS or NCCL operation: it sets the words at these addresses to 1."""
    block = max(32, next_power_of_2(len(addresses)))
    words = addresses_tensor(addresses + (0,) * (block - len(addresses)), device)
    return KernelCall(tell_kernel, [words, block], {"num_warps": 1})


def stamp_call(words: list[torch.Tensor], rank: int, world_size: int) -> KernelCall:
    """Return the barrier that reads the clock. words: state, addresses, signals, words, limits."""
    return KernelCall(stamp_kernel, [*words, rank, world_size], {"num_warps": 4})
