"""The gated activation between the two matmuls of an expert, of products that lie side by side."""

from __future__ import annotations

from math import inf, isfinite, isnan
from typing import NamedTuple, get_args

import torch

from overweave.errors import InputError
from overweave.ir.operators.forms import Activation
from overweave.runtime.library.epilogue import IN_TORCH


class Glu(NamedTuple):
    """`act(gate) * (up + shift)` of products `[rows, 2 * inner]`: with a limit gate is at most it, up within it.

    activation: `silu`, `gelu`, `gelu_tanh`. interleaved: gate and up stand in turns, column by column; else the gate's
    columns are the first half. limit: None for none. slope: `gate * sigmoid(slope * gate)` in place of silu.
    Of gpt-oss: `Glu(interleaved=True, limit=7.0, slope=1.702, shift=1.0)`.
    """

    activation: str = "silu"
    interleaved: bool = False
    limit: float | None = None
    slope: float = 1.0
    shift: float = 0.0

    @property
    def gating(self) -> tuple[float, float, float]:
        """Return limit, slope and shift, as `grouped_matmul` takes them."""
        return inf if self.limit is None else self.limit, self.slope, self.shift


GPT_OSS = Glu(interleaved=True, limit=7.0, slope=1.702, shift=1.0)


def gated(products: torch.Tensor, glu: Glu) -> torch.Tensor:
    """`[rows, 2 * inner]` -> `[rows, inner]`: in fp32, rounded once."""
    first, up = gate_and_up(products.float(), glu)
    if glu.limit is not None:
        first, up = IN_TORCH["at most"](first, (glu.limit,)), IN_TORCH["within"](up, (glu.limit,))
    act = IN_TORCH[glu.activation](glu.slope * first, ()) / glu.slope
    made: torch.Tensor = (act * (up + glu.shift)).to(products.dtype)
    return made


def gate_and_up(packed: torch.Tensor, glu: Glu) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both halves of the last dimension, as views: columns of products, or of biases."""
    if glu.interleaved:
        return packed[..., ::2], packed[..., 1::2]
    inner = packed.shape[-1] // 2
    return packed[..., :inner], packed[..., inner:]


def check_glu(name: str, glu: object, n: int) -> None:
    """Raise InputError for one that cannot be applied to n columns."""
    asked = f"{name}: glu, a Glu or None"
    if glu is None:
        return
    if not isinstance(glu, Glu):
        raise InputError(asked, f"got {type(glu).__name__}", "Pass overweave.moe.Glu(...)")
    if glu.activation not in get_args(Activation):
        cure = f"Use one of {', '.join(get_args(Activation))}"
        raise InputError(asked, f"got activation {str(glu.activation)[:40]!r}", cure)
    numbers = {"slope": glu.slope, "shift": glu.shift, "limit": 1.0 if glu.limit is None else glu.limit}
    for field, number in numbers.items():
        is_it = isinstance(number, int | float) and not isnan(number) and (field == "limit" or isfinite(number))
        if not is_it or (field == "slope" and number == 0) or (field == "limit" and number <= 0):
            found = f"got {field} {str(number)[:40]!r}"
            raise InputError(asked, found, "Pass numbers; a slope other than 0, a limit above 0, None for no limit")
    if glu.slope != 1.0 and glu.activation != "silu":
        raise InputError(asked, f"got slope {glu.slope} of {glu.activation}", "Only silu has a slope")
    if n % 2:
        raise InputError(
            asked, f"w has {n} rows for each expert", "Pack the gate and the other product: an even number"
        )
