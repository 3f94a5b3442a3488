"""Rates of torch's attention on one GPU: each pass over causal sequences of two lengths, which tell the rate from what
a kernel costs beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from overweave.hardware.machine import Pass
from overweave.tuner.calibrate.rates import medians_us

TOKENS, HEADS, HEAD_DIMS = (4096, 16384), 16, (64, 128)
OPERATIONS: dict[Pass, int] = {"forward": 4, "backward": 10}  # a column, for each pair of a query and a key
QUICKEST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class MeasuredAttention(NamedTuple):
    """As of an AttentionRate."""

    direction: Pass
    head_dim: int
    tflops: float
    overhead_us: float


def attention_rates(call_us: float) -> tuple[MeasuredAttention, ...]:
    """Return the rate of each pass. call_us: of a call and its kernel, beyond what runs in it."""
    found = []
    for head_dim in HEAD_DIMS:
        times = [medians_us([*_passes(tokens, head_dim)]) for tokens in TOKENS]
        torch.cuda.empty_cache()
        forward = [us[0] - call_us for us in times]
        backward = [us[1] - us[0] for us in times]
        found.append(rate_of("forward", head_dim, (forward[0], forward[1])))
        found.append(rate_of("backward", head_dim, (backward[0], backward[1])))
    return tuple(found)


def rate_of(direction: Pass, head_dim: int, times_us: tuple[float, float]) -> MeasuredAttention:
    """Return what two times say, of the lengths of TOKENS."""
    (short, long), (short_us, long_us) = (
        (OPERATIONS[direction] * HEADS * head_dim * tokens * (tokens + 1) / 2 for tokens in TOKENS),
        times_us,
    )
    tflops = (long - short) / (long_us - short_us) / 1e6
    return MeasuredAttention(direction, head_dim, tflops, max(0.0, short_us - short / tflops / 1e6))


def _passes(tokens: int, head_dim: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return attention of one sequence, and with its gradients."""
    shape = (1, HEADS, tokens, head_dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [each.requires_grad_() for each in (q, k, v)]

    def attend() -> torch.Tensor:
        with sdpa_kernel(QUICKEST, set_priority=True):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> object:
        return torch.autograd.grad(attend(), leaves, dout)

    return attend, both
