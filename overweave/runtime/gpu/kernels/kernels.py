"""How kernels are launched: compiled for fixed shapes, loaded, and called with a few microseconds of host time.

A `Launch` never compiles after it is made. Tensors that stay the same from call to call are bound as plain addresses;
what moves is bound through a `Moving` (arguments.py), which descriptors and arguments read at each launch.
"""

from __future__ import annotations

from typing import Any

import torch
from triton import next_power_of_2

from overweave.ir.plan import CopyConfig, Exchange, PackedConfig, ReduceConfig
from overweave.kernels.copy import copy_kernel
from overweave.kernels.packed.gather import packed_gather_kernel
from overweave.kernels.packed.one_shot import packed_all_reduce_kernel
from overweave.kernels.packed.scatter import packed_scatter_kernel
from overweave.kernels.packed.two_shot import packed_two_shot_kernel
from overweave.kernels.reduction import reduction_kernel
from overweave.memory.cuda.heap import sms_for_copies
from overweave.memory.device.protocol import begin_kernel, tell_kernel, wait_kernel
from overweave.runtime.gpu.kernels.launcher import PackedLaunch
from overweave.runtime.gpu.kernels.tile_call import Summing, copy_arguments, reduction_arguments

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


class Launch:
    """A compiled kernel with its grid, arguments and options, loaded and ready."""

    def __init__(self, kernel: Any, programs: int, arguments: list[Any], options: dict[str, int]) -> None:
        self.compiled = kernel.warmup(*arguments, grid=(programs,), **options)
        self.compiled._init_handles()
        self._kept_alive = arguments
        self._launch = PackedLaunch(self.compiled, programs, [fixed(argument) for argument in arguments])

    def __call__(self, stream: int) -> None:
        """Launches on a stream."""
        self._launch(stream)


def fixed(argument: Any) -> Any:
    """A tensor's address, of tensors in a tuple too; anything else as it is."""
    if isinstance(argument, tuple):
        return tuple(fixed(one) for one in argument)
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


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


SUMS_PER_SM = 4  # of the SMs that are left to copies; a block of sums takes an eighth of one


def reduction_launch(
    config: ReduceConfig, arguments: list[Any], tiles: int, widths: tuple[int, int, int], how: Summing
) -> Launch:
    """The ordered reduction. arguments, widths: as of `reduction_arguments`."""
    given, options = reduction_arguments(config, arguments, widths, how), reduction_options(config, how.epilogue)
    return Launch(reduction_kernel, summing_programs(config, tiles), given, options)


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
    """The pushes of chunks, or what adds them. arguments: as of `copy_arguments`."""
    given = copy_arguments(arguments, config.block_kib * WORDS_PER_KIB, config.path == "bulk", adds, traced)
    return Launch(copy_kernel, min(config.programs, tiles), given, {"num_warps": config.warps})


def packed_launch(config: PackedConfig, arguments: list[Any], programs: int, is_early: bool = False) -> Launch:
    """An exchange of packed messages. arguments: all that runtime/gpu/kernels/packed_call.py tells. is_early: it starts
    before the kernel in front ends."""
    options: dict[str, int] = {"num_warps": config.warps} | (EARLY if is_early else {})
    return Launch(PACKED_KERNELS[config.exchange], programs, arguments, options)
