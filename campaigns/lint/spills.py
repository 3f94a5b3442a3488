"""Registers that kernels may spill with one version of Triton: tile shapes fit the registers that another needs."""

from __future__ import annotations

from collections.abc import Iterable

import triton

from overweave.compat.versions import numbers
from tools.aot import Compiled
from tools.ptx_lint.contract import Finding

REDUCTION, HOPPER = "reduction_kernel", "matmul_hopper_kernel"
STACK_BYTES = 16  # a stack frame is a multiple of as many at the most
Bytes = dict[str, int]  # by configuration

# By version of Triton and kernel, the most bytes that a configuration may spill. A configuration that is not here
# spills nothing.
ALLOWED: dict[tuple[int, int], dict[str, Bytes]] = {
    # Consumers wait for three addends beside five rectangles: one register, once a tile.
    # Seven addends of seven peers beside the accumulator of 128 x 256, traced: one register, too.
    (3, 6): {
        HOPPER: {
            "bfloat16 128x160x64 4w5s/5 3 addends": 4,
            "bfloat16 128x256x64 4w3s/2 traced 7 addends 7 peers": 4,
        }
    },
    (3, 7): {HOPPER: {"bfloat16 128x256x64 4w3s/2 traced 7 addends 7 peers": 4}},
    (3, 8): {
        HOPPER: {
            "bfloat16 128x256x64 4w3s/2 traced 7 addends 7 peers": 4,
            "float8_e4m3fn 128x128x128 4w4s b^T two sources scaled by rows+gelu+gate": 12,
        }
    },
    # 3.9 brings another assembler, which it tells to try less (--regAllocOptLevel=2), around a fault of that.
    # MEASURED: 11 matmuls took 0.998 of 3.6's time in whole tiles and 1.003 as they are chosen, in the geometric mean;
    # with the option at 4, by which less is spilled, they were no quicker (benchmarks/results/versions.h200.*.txt).
    (3, 9): {
        # Eight operands of 16 bytes are loaded ahead, with that option and without it.
        REDUCTION: {
            "bfloat16 8 operands": 312,
            "bfloat16 8 operands traced": 320,
            "float16 8 operands": 312,
            "float16 8 operands traced": 320,
            "bfloat16 8 operands 8 told": 332,
            "bfloat16 by a map of 128x256 4x1024 norm": 16,
            "bfloat16 by a map of 128x192 4x1024 norm": 16,
            "bfloat16 by a map of 128x160 4x1024 norm": 16,
        },
        # Once a tile, behind its main loop: what an epilogue reads, and several addends.
        HOPPER: {
            "bfloat16 128x256x64 4w3s/2 b^T two sources bias+silu": 100,
            "bfloat16 128x192x64 4w4s/3 b^T two sources bias+silu": 4,
            "bfloat16 128x192x64 4w4s/3 b^T two sources bias+silu 3 weights": 4,
            "bfloat16 128x256x64 4w3s/2 b^T two sources bias+gelu_tanh+residual": 596,
            "bfloat16 128x192x64 4w4s/3 b^T two sources bias+gelu_tanh+residual": 12,
            "bfloat16 128x256x64 4w3s/2 3 addends": 60,
            "bfloat16 128x256x64 4w3s/4 3 addends": 88,
            "bfloat16 128x192x64 4w4s/3 3 addends": 8,
            "bfloat16 256x128x64 4w3s/2 3 addends": 108,
            "bfloat16 128x160x64 4w5s/5 3 addends": 16,
            "bfloat16 128x160x64 4w5s/5 1 addend": 16,
            "bfloat16 128x256x64 4w3s/2 traced 3 addends": 76,
            "bfloat16 128x256x64 4w3s/2 b^T ragged 3 addends": 60,
            "bfloat16 128x256x64 4w3s/2 bias+silu+residual 3 addends": 36,
            "bfloat16 128x192x64 4w4s/3 bias+silu+residual 3 addends": 8,
            "bfloat16 128x256x64 4w3s/2 bias+silu+residual 1 addend": 680,
            "bfloat16 128x192x64 4w4s/3 bias+silu+residual 1 addend": 4,
            "bfloat16 256x128x64 4w3s/2 bias+silu+residual 1 addend": 348,
            "bfloat16 128x256x64 4w3s/2 3 addends 3 peers": 60,
            "bfloat16 128x256x64 4w3s/4 3 addends 3 peers": 88,
            "bfloat16 128x192x64 4w4s/3 3 addends 3 peers": 8,
            "bfloat16 256x128x64 4w3s/2 3 addends 3 peers": 108,
            "bfloat16 128x160x64 4w5s/5 3 addends 3 peers": 8,
            "bfloat16 128x160x64 4w5s/5 1 addend 3 peers": 8,
            "bfloat16 128x256x64 4w3s/2 1 addend 3 peers spread": 28,
            "bfloat16 128x256x64 4w3s/4 1 addend 3 peers spread": 8,
            "bfloat16 256x128x64 4w3s/2 1 addend 3 peers spread": 8,
            "bfloat16 128x160x64 4w5s/5 1 addend 3 peers spread": 8,
            "bfloat16 128x256x64 4w3s/2 traced 1 addend 1 peers spread": 12,
            "bfloat16 128x256x64 4w3s/2 bias+silu+residual 1 addend 3 peers spread": 232,
            "bfloat16 128x256x64 4w3s/2 traced 7 addends 7 peers": 192,
            "bfloat16 128x192x64 4w4s/3 bias+silu+residual 1 addend 3 peers spread": 4,
            "bfloat16 256x128x64 4w3s/2 bias+silu+residual 1 addend 3 peers spread": 120,
            "float8_e4m3fn 128x128x128 4w4s b^T two sources scaled by rows+gelu+gate": 36,
            "float8_e4m3fn 128x256x128 4w3s/2 b^T two sources scaled by tensor+bias+gelu_tanh": 4,
            "float8_e4m3fn 128x256x128 4w3s/2 b^T two sources traced scaled by rows+bias+gelu_tanh+residual": 4,
        },
    },
}


def beyond(compiled: Compiled, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Those of a kernel's findings that are no spill which the Triton at hand is allowed."""
    of_kernels = ALLOWED.get(numbers(triton.__version__), {})
    most = of_kernels.get(compiled.name, {}).get(compiled.config, 0)
    used = compiled.resources
    is_allowed = used.spill_bytes <= most and used.stack_bytes <= -(-most // STACK_BYTES) * STACK_BYTES
    return tuple(each for each in findings if each.rule != "spills" or not is_allowed)
