"""How many operations an op computes, for torch's FlopCounterMode: those of its matmuls, as torch counts its own.

2 * rows * k * n    of each product; rows: all that a gather multiplies, or those that come before a sum
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from overweave.compat.torch_names import get_current_dispatch_mode_stack
from overweave.ir.operators.forms import GATE
from overweave.ir.operators.registry import record_of
from overweave.ops.dispatch.schema import DEFINED, Defined

_COUNTER = "torch.utils.flop_counter"  # loads triton, so that it is looked for and not imported


def tell_counters() -> None:
    """Counters that look on, and those to come, know the formulas of all ops that are defined."""
    counter = sys.modules.get(_COUNTER)
    if counter is None:
        return
    modes = [getattr(mode, "counter", mode) for mode in get_current_dispatch_mode_stack()]
    registries = [counter.flop_registry, *(getattr(mode, "flop_registry", None) for mode in modes)]
    for registry in filter(None, registries):
        for name, defined in DEFINED.items():
            registry.setdefault(defined.op._overloadpacket, _Formula(name, defined))


class _Formula:
    """Of one op, as a counter calls it."""

    def __init__(self, name: str, defined: Defined) -> None:
        self._gathers = record_of(name).gathers
        self._gate = defined.names.index(GATE) if GATE in defined.names else None

    def __call__(self, x: Any, w: Any, *beside: Any, out_val: list[torch.Tensor], **options: Any) -> int:
        """x, w, beside: what the op was passed; out_val: what it returned."""
        pairs = list(zip(x, w, strict=True)) if len(x) == len(w) else [(x[0], each) for each in w]
        if self._gate is not None and len(beside) > self._gate and beside[self._gate] is not None:
            pairs.append((x[0], beside[self._gate]))
        flops: int = sum(2 * self._rows(one, out_val) * one.shape[1] * weight.shape[1] for one, weight in pairs)
        return flops

    def _rows(self, x: torch.Tensor, out_val: list[torch.Tensor]) -> int:
        return out_val[0].shape[0] if self._gathers else x.shape[0]
