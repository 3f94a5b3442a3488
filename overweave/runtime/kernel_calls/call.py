"""A kernel call and its arguments: stand-ins for tensors whose address changes, descriptors, tables, protocol words."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from triton import next_power_of_2
from triton.tools.tensor_descriptor import TensorDescriptor

from overweave.errors import MachineError
from overweave.ir.exchange import NO_REACH
from overweave.ir.tile_order import TileRow
from overweave.kernels.arguments import LaunchTiles, SignalWords
from overweave.memory.device.protocol import begin_kernel, stamp_kernel, tell_kernel, wait_kernel
from overweave.memory.group import Group
from overweave.memory.heap import Heap, ranks_in_reach
from overweave.memory.layout import SIGNAL_STRIDE_WORDS
from overweave.memory.split_k import SharedShares

# Launch option of a kernel that starts before the kernel in front of it ends (memory/device/protocol.py).
DEPENDENT_LAUNCH: dict[str, int] = {"launch_pdl": True}


class KernelCall(NamedTuple):
    """One launch of a kernel. arguments: in the kernel's order. options: of the compilation, such as num_warps.

    programs: of the grid; of a kernel whose programs claim tiles, at most.
    """

    kernel: Any
    arguments: list[Any]
    options: dict[str, int]
    programs: int = 1


@dataclass
class Moving:
    """A stand-in, in descriptors and arguments, for a tensor whose address changes from call to call."""

    address: int
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    def data_ptr(self) -> int:
        """Return the address of the next launch's tensor."""
        return self.address

    def stride(self) -> tuple[int, ...]:
        """Return the strides, as of a tensor."""
        return self.strides


MatrixInput = torch.Tensor | Moving


def stand_in_for(tensor: torch.Tensor) -> Moving:
    """Return a stand-in with the address, dtype, shape and strides of a tensor."""
    return Moving(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def as_words(matrix: MatrixInput) -> MatrixInput:
    """Return the same memory as int32."""
    if isinstance(matrix, torch.Tensor):
        return matrix.view(torch.int32)
    matrix.dtype = torch.int32
    return matrix


class TileKernelArgs(NamedTuple):
    """Arguments of every tile kernel from its plan. traced: the kernel records when each tile ran."""

    queue: LaunchTiles
    protocol: SignalWords
    traced: bool = False


def table_tensor(rows: tuple[TileRow, ...], device: torch.device) -> torch.Tensor:
    """Return a tile order as the kernels read it: int32 `[tiles, columns]`."""
    return torch.tensor(rows, dtype=torch.int32, device=device).reshape(-1, len(TileRow._fields))


def addresses_tensor(rows: Any, device: torch.device) -> torch.Tensor:
    """Return addresses as the kernels read them: int64, of any shape."""
    return torch.tensor(rows, dtype=torch.int64, device=device)


def descriptor(matrix: MatrixInput, block: list[int], is_transposed: bool = False) -> TensorDescriptor:
    """Return a TMA descriptor of a matrix whose rows (columns, if transposed) start at multiples of 16 bytes."""
    return TensorDescriptor(matrix, *storage_layout(matrix, is_transposed), block)


def storage_layout(matrix: MatrixInput, is_transposed: bool) -> tuple[list[int], list[int]]:
    """Return shape and strides of a matrix, or of a stack of them, in memory order, row-major."""
    shape, strides = list(matrix.shape), list(matrix.stride())
    step = -1 if is_transposed else 1
    return shape[:-2] + shape[-2:][::step], strides[:-2] + strides[-2:][::step]


@dataclass(frozen=True)
class Reshaped:
    """The memory of a stand-in as a matrix of another shape."""

    of: Moving
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def address(self) -> int:
        """Return the address of the next launch's tensor."""
        return self.of.address

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype."""
        return self.of.dtype

    def data_ptr(self) -> int:
        """Return the address of the next launch's tensor."""
        return self.of.address

    def stride(self) -> tuple[int, ...]:
        """Return the strides, as of a tensor."""
        return self.strides


def stack_step(stack: MatrixInput, is_transposed: bool) -> int:
    """Return how many rows, as they lie in memory, each matrix of a stack lies behind the one before."""
    (_, strides) = storage_layout(stack, is_transposed)
    return strides[0] // strides[1]


def flattened(stack: MatrixInput, is_transposed: bool) -> Any:
    """Return a stack of matrices `[count, k, n]` as one matrix, of all rows as they lie in memory; what may lie between
    the rows of two of them, too."""
    (count, rows, cols), (_, width, _) = storage_layout(stack, is_transposed)
    total = (count - 1) * stack_step(stack, is_transposed) + rows
    shape, strides = ((cols, total), (1, width)) if is_transposed else ((total, cols), (width, 1))
    if isinstance(stack, torch.Tensor):
        return stack.as_strided(shape, strides)
    return Reshaped(stack, shape, strides)


class Peers(NamedTuple):
    """Where the tiles of a kernel store at other ranks (kernels/tile_end.py).

    table: int64, two words for each rank (memory/lower.peer_slot_offsets), then the address of `spread` or 0, and the
    interval between strips (bind.py). distances: offset of each peer's slot from this rank's in bytes, the next rank
    first. spread: this rank's instance of the buffer to which every rank's sums go; None if sums go to one rank.
    """

    table: torch.Tensor
    distances: tuple[int, ...]
    spread: torch.Tensor | None

    @property
    def spread_ranks(self) -> int | None:
        """Return the number of ranks if sums go to all of them; else None."""
        return None if self.spread is None else len(self.distances) + 1

    def at_peers(self, own: MatrixInput) -> Iterator[Moving]:
        """Yield each peer's instance of a workspace buffer. own: this rank's instance."""
        shape, strides = tuple(own.shape), own.stride()
        return (Moving(own.data_ptr() + distance, own.dtype, shape, strides) for distance in self.distances)


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
    """Return the number of ranks that exchange credits and abort each other: those of an island; without peer access,
    one.

    No kernel waits for other ranks: NCCL's collectives synchronize these.
    """
    return len({*workspace.words.addresses})


def require_peer_access(workspace: ProtocolWords, what: str, reached: Collection[int] | None = None) -> None:
    """Raise MachineError without peer access: an access to a peer would go to this rank's own memory. reached: the
    peers that this rank addresses; None: all."""
    group = workspace.group
    in_reach = ranks_in_reach(workspace.words.addresses, group.rank)
    if not {*(range(group.world_size) if reached is None else reached)} <= {*in_reach}:
        cure = "Take a plan whose rows the library moves, such as sequential; `overweave doctor` names the GPUs"
        raise MachineError(f"run {what} on {group.world_size} GPUs", f"they {NO_REACH}", cure)


def prologue_call(workspace: ProtocolWords, protocol: SignalWords, signals: int) -> KernelCall:
    """Return the call of the prologue kernel. signals: that the call uses."""
    words = [workspace.state, protocol.signals, workspace.claims, protocol.words, protocol.limits]
    rank = workspace.group.rank
    place = ranks_in_reach(workspace.words.addresses, rank).index(rank)
    numbers = [signals, place, protocol.world_size]
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
