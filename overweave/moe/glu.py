"""What stands between the two matmuls of an expert: a gated activation of products that lie side by side."""

from __future__ import annotations

from typing import NamedTuple

import torch

from overweave.errors import InputError
from overweave.runtime.library.epilogue import ACTIVATIONS


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
    def is_plain(self) -> bool:
        """Whether it is an activation and a product, as tile kernels have them."""
        return self.limit is None and self.slope == 1.0 and self.shift == 0.0


GPT_OSS = Glu(interleaved=True, limit=7.0, slope=1.702, shift=1.0)


def gated(products: torch.Tensor, glu: Glu) -> torch.Tensor:
    """`[rows, 2 * inner]` -> `[rows, inner]`: in fp32, rounded once."""
    first, up = gate_and_up(products, glu)
    first, up = first.float(), up.float()
    if glu.limit is not None:
        first, up = first.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit)
    act = first * torch.sigmoid(glu.slope * first) if glu.slope != 1.0 else ACTIVATIONS[glu.activation](first)  # type: ignore[index]
    return (act * (up + glu.shift)).to(products.dtype)


def gate_and_up(packed: torch.Tensor, glu: Glu) -> tuple[torch.Tensor, torch.Tensor]:
    """The two halves of the last dimension, as views: columns of products, or of biases."""
    if glu.interleaved:
        return packed[..., ::2], packed[..., 1::2]
    inner = packed.shape[-1] // 2
    return packed[..., :inner], packed[..., inner:]


def check_glu(name: str, glu: object, n: int) -> None:
    """Raises InputError for one that cannot be applied to n columns."""
    asked = f"{name}: glu, a Glu or None"
    if glu is None:
        return
    if not isinstance(glu, Glu):
        raise InputError(asked, f"got {type(glu).__name__}", "Pass overweave.moe.Glu(...)")
    if glu.activation not in ACTIVATIONS:
        raise InputError(asked, f"got activation {str(glu.activation)[:40]!r}", f"Use one of {', '.join(ACTIVATIONS)}")
    if glu.slope != 1.0 and glu.activation != "silu":
        raise InputError(asked, f"got slope {glu.slope} of {glu.activation}", "Only silu has a slope")
    if n % 2:
        raise InputError(
            asked, f"w has {n} rows for each expert", "Pack the gate and the other product: an even number"
        )
