"""What a plan will run on, and what the tile kernels can do there."""

from __future__ import annotations

import torch
from msgspec import Struct

from overweave.ir.dtype import FLOAT8, ITEMSIZE_BYTES
from overweave.ir.plan import MOST_WEIGHTS, Problem

DESCRIPTOR_BYTES = 16  # bulk-tensor rows start at multiples of this


class Target(Struct, frozen=True):
    """What a plan will run on. is_hopper: sm_90. name: the GPU's, as its driver tells it; of no meaning on a CPU."""

    kind: str
    sms: int = 132
    is_hopper: bool = True
    name: str = "NVIDIA H200"

    @property
    def device(self) -> str:
        """What a measurement was made on."""
        return self.name if self.kind == "cuda" else self.kind


def target_of(device: torch.device) -> Target:
    """What a device means to the choice of a plan."""
    if device.type == "cpu":
        return Target("cpu")
    properties = torch.cuda.get_device_properties(device)
    return Target("cuda", properties.multi_processor_count, properties.major == 9, properties.name)


def tile_options(target: Target) -> dict[str, str | int]:
    """Options that every plan with a tile kernel takes on a target."""
    if target.kind == "cpu":
        return {}
    return {"kernel": "hopper" if target.is_hopper else "portable", "sms": target.sms, "pieces": 1}


def kernel_obstacle(problem: Problem, target: Target) -> str:
    """Why the tile kernels cannot, or should not, compute a problem; empty if they can."""
    if problem.dtype == "float32" and target.kind == "cuda":
        return "fp32 without TF32 runs outside the tensor cores, where the library's matmul is faster"
    if problem.dtype == FLOAT8 and target.kind == "cuda":
        if not target.is_hopper:
            return "the tile kernels multiply fp8 on sm_90 only"
        if problem.out_dtype == "float32":
            return "the tile kernels keep products of fp8 in 16 bits: tiles of 32 would not fit beside the operands"
    step = DESCRIPTOR_BYTES // ITEMSIZE_BYTES[problem.dtype]
    if problem.k % step or any(width % step for width in problem.widths):
        found = f"n={problem.n_text} and k={problem.k} must be multiples of {step}"
        return f"{found}: rows must start at multiples of 16 bytes"
    return ""


def weights_obstacle(problem: Problem) -> str:
    """Why the tile kernels cannot multiply by all weights of a problem at once; empty if they can."""
    count = len(problem.widths)
    return f"there are {count} weights, and a tile kernel takes {MOST_WEIGHTS}" if count > MOST_WEIGHTS else ""
