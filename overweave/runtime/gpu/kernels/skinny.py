"""Launches of the matmul of few rows: in plans of packed messages, or alone on one GPU."""

from __future__ import annotations

import torch
from triton.backends.nvidia.compiler import CUDAOptions

from overweave.ir.plan import SkinnyConfig
from overweave.kernels.skinny import skinny_matmul_kernel
from overweave.memory.cuda.shares import SharedShares, Shares
from overweave.runtime.gpu.kernels.kernels import EARLY, Launch
from overweave.runtime.gpu.kernels.skinny_call import Factors, Turn, share_places, skinny_arguments


def skinny_launch(config: SkinnyConfig, factors: Factors, memory: SharedShares, turn: Turn = "in_turn") -> Launch:
    """`out = a @ b`, ready to run. memory: where shares along k leave their sums, and counters at zero. turn: whether
    the next kernel starts before this one ends, or this one before `a` is there."""
    places = share_places(config, factors.a.shape[0], factors.b.shape[1])
    shares: Shares | None = memory.get(places, config.block_m * config.block_n) if places else None
    arguments, programs = skinny_arguments(config, factors, shares, turn)
    options = {"num_warps": config.warps, "num_stages": config.stages} | (EARLY if turn == "follows" else {})
    return Launch(skinny_matmul_kernel, programs, arguments, options)


def may_start_early(device: torch.device) -> bool:
    """Whether the GPU can start a kernel before the one in front ends, and this Triton can ask it to."""
    is_known = all(name in CUDAOptions.__dataclass_fields__ for name in EARLY)
    return is_known and torch.cuda.get_device_properties(device).major >= 9
