"""How kernels are launched: compiled for fixed shapes, loaded, and called with a few microseconds of host time.

A `Launch` never compiles after it is made. Tensors that stay the same from call to call are bound as plain addresses;
what moves is bound through a `Moving`, which descriptors and arguments read at each launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton import next_power_of_2
from triton.tools.tensor_descriptor import TensorDescriptor

from overweave.ir.plan import CopyConfig, Exchange, PackedConfig, ReduceConfig
from overweave.ir.tile_order import TileRow
from overweave.kernels.copy import copy_kernel
from overweave.kernels.packed.gather import packed_gather_kernel
from overweave.kernels.packed.one_shot import packed_all_reduce_kernel
from overweave.kernels.packed.scatter import packed_scatter_kernel
from overweave.kernels.packed.two_shot import packed_two_shot_kernel
from overweave.kernels.reduction import reduction_kernel
from overweave.memory.cuda.heap import sms_for_copies
from overweave.memory.device.protocol import begin_kernel, tell_kernel, wait_kernel
from overweave.runtime.gpu.kernels.launcher import PackedLaunch

PACKED_KERNELS: dict[Exchange, Any] = {
    "one_shot": packed_all_reduce_kernel,
    "two_shot": packed_two_shot_kernel,
    "scatter": packed_scatter_kernel,
    "gather": packed_gather_kernel,
}
BEGIN_BLOCK = 128
EARLY: dict[str, int] = {
    "launch_pdl": True
}  # of a kernel that starts before the one in front ends (memory/device/early.py)
MOST_REGISTERS = 224  # of a thread
WORDS_PER_KIB = 256  # of int32


@dataclass
class Moving:
    """A tensor whose address changes from call to call; stands for it in descriptors and arguments."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Where the tensor of the next launch lies."""
        return self.address


def moving(tensor: torch.Tensor) -> Moving:
    """A stand-in that starts at `tensor`."""
    return Moving(tensor.data_ptr(), tensor.dtype)


class Launch:
    """A compiled kernel with its grid, arguments and options, loaded and ready."""

    def __init__(self, kernel: Any, programs: int, arguments: list[Any], options: dict[str, int]) -> None:
        self.compiled = kernel.warmup(*arguments, grid=(programs,), **options)
        self.compiled._init_handles()
        self._kept_alive = arguments
        fixed = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in arguments]
        self._launch = PackedLaunch(self.compiled, programs, fixed)

    def __call__(self, stream: int) -> None:
        """Launches on a stream."""
        self._launch(stream)


def begin_launch(words: list[torch.Tensor], numbers: list[int]) -> Launch:
    """The head of a call. words: state, signals, claims, words, limits. numbers: signals, rank, world_size."""
    return Launch(begin_kernel, 1, [*words, *numbers, BEGIN_BLOCK], {"num_warps": 4})


def tell_launch(addresses: tuple[int, ...], device: torch.device) -> Launch:
    """What a library call's operation tells its peers: the words at these addresses become 1."""
    block = max(32, next_power_of_2(len(addresses)))
    return Launch(tell_kernel, 1, [told_addresses(addresses, block, device), block], {"num_warps": 1})


def wait_launch(words: list[torch.Tensor], numbers: list[int]) -> Launch:
    """A wait in the caller's stream. words: signals, words, limits. numbers: the rest, as of `wait_kernel`."""
    return Launch(wait_kernel, 1, [*words, *numbers], {"num_warps": 1})


def told_addresses(addresses: tuple[int, ...], count: int, device: torch.device) -> torch.Tensor:
    """As many addresses as a kernel asks for, int64; 0 for none."""
    return torch.tensor(addresses + (0,) * (count - len(addresses)), dtype=torch.int64, device=device)


class Summing(NamedTuple):
    """How a reduction ends, beyond its sums: with a trace, with the norm of whole rows (kernels/norm.py), or with an
    epilogue, whose bits these are (kernels/epilogue.py)."""

    traced: bool = False
    bias: Moving | None = None
    residual: Moving | None = None
    norm_weight: Moving | None = None
    z: Moving | None = None
    eps: float = 0.0
    sum_first: bool = False  # the first operand of each is kept in fp32
    epilogue: int = 0
    ready: torch.Tensor | None = None  # addresses of words that become 1 when it begins, as of `told_addresses`


SUMS_PER_SM = 4  # of the SMs that are left to copies; a block of sums takes an eighth of one


def reduction_launch(
    config: ReduceConfig, arguments: list[Any], tiles: int, widths: tuple[int, int, int], how: Summing
) -> Launch:
    """The ordered reduction. arguments: everything before the constants of `reduction_kernel`, but for what `how`
    has. widths: as memory/lower.py says."""
    normed = [*arguments[:2], how.bias, how.residual, how.norm_weight, how.z, how.ready, *arguments[2:]]
    ready = 0 if how.ready is None else how.ready.numel()
    blocks = [*widths, ready, config.block_m, config.block_n // config.parts]
    constants = [*blocks, how.traced, how.eps, how.sum_first, how.epilogue]
    options = reduction_options(config, how.epilogue)
    return Launch(reduction_kernel, summing_programs(config, tiles), normed + constants, options)


def summing_programs(config: ReduceConfig, tiles: int) -> int:
    """How many programs sum: few where copies need room on the SMs that tiles leave free (`sms_for_copies`)."""
    most = SUMS_PER_SM * sms_for_copies() or config.programs
    return min(config.programs, tiles, most)


def reduction_options(config: ReduceConfig, epilogue: int) -> dict[str, int]:
    """How the reduction is compiled. Beside an epilogue the assembler would rather spill some registers than take more
    than 64 (Triton 3.6), unless it is told that it may.
    """
    return {"num_warps": config.warps} | ({"maxnreg": MOST_REGISTERS} if epilogue else {})


def copy_launch(config: CopyConfig, arguments: list[Any], tiles: int, traced: bool, adds: bool = False) -> Launch:
    """The pushes of chunks, or what adds them. arguments: everything before the constants of `copy_kernel`."""
    constants = [config.block_kib * WORDS_PER_KIB, config.path == "bulk" and not adds, adds, traced]
    return Launch(copy_kernel, min(config.programs, tiles), arguments + constants, {"num_warps": config.warps})


def packed_launch(config: PackedConfig, arguments: list[Any], programs: int, is_early: bool = False) -> Launch:
    """An exchange of packed messages. arguments: all that runtime/gpu/kernels/packed_call.py tells. is_early: it starts
    before the kernel in front ends."""
    options: dict[str, int] = {"num_warps": config.warps} | (EARLY if is_early else {})
    return Launch(PACKED_KERNELS[config.exchange], programs, arguments, options)


def table_tensor(rows: tuple[TileRow, ...], device: torch.device) -> torch.Tensor:
    """A tile order as the kernels read it: int32 `[tiles, columns]`."""
    return torch.tensor(rows, dtype=torch.int32, device=device).reshape(-1, len(TileRow._fields))


def descriptor(matrix: torch.Tensor, block: list[int], base: Any = None) -> TensorDescriptor:
    """A bulk-tensor descriptor of a row-major matrix whose rows start at multiples of 16 bytes."""
    described = TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block)
    if base is not None:
        described.base = base
    return described
