"""What is done to a product beside: to each element before it is stored, or to each row of a sum once it is whole."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from overweave.ir.operators.forms import (
    BIAS,
    GATE,
    NORM_WEIGHT,
    RESIDUAL,
    SCALE_W,
    SCALE_X,
    Z,
    input_of,
    registered,
)

EPILOGUE_BITS = {"bias": 1, "silu": 2, "gelu": 4, "gelu_tanh": 8, "residual": 16, "tensor": 32, "rows": 64, "gate": 128}
ADDED = "added"
EPILOGUE_BITS[ADDED] = 256
MOST_NORM_COLS = 1 << 16  # a row is one tile of the reduction
Activation = Literal["silu", "gelu", "gelu_tanh"]
Scaling = Literal["tensor", "rows"]


class Applied(Struct, frozen=True, forbid_unknown_fields=True):
    """An epilogue that was registered (`Form`), by its name, with the numbers that a call passes for it."""

    name: str
    numbers: tuple[float, ...] = ()

    def __str__(self) -> str:
        said = zip(registered(self.name).numbers, self.numbers, strict=True)
        return "".join((self.name, *(f" {name}={number!r}" for name, number in said)))


class Epilogue(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is done to each element of a product before it is stored: `activation(scaled(y) + bias) + residual`.

    scaling: y is multiplied by `scale_x * scale_w`, fp32. tensor: one of each, `[1, 1]`, `scale_x` alike on all ranks
    that gather rows of one another. rows: `scale_x` for each row of x, `[m/W, 1]` with its owner, or `[m, 1]` where x
    holds all rows, and `scale_w [1, n]` for each column of w. Of a sum over ranks each part is scaled by its own.
    bias: `[n]` is added. activation: as torch.nn.functional names them; gelu_tanh is its `approximate="tanh"`.
    residual: `[m, n]` is added. A kernel computes all of it in fp32 and rounds once; the library rounds at each step.
    gate: `y * activation(a @ gate) + residual` instead, without bias, for a second weight `gate [k, n]` of the layout
    of the first: both products of a tile are computed from the same rows of `a`. scale_w has the gate's scales behind
    those of the first: two elements, `[1, 2]`, or `[1, 2n]`.
    more: what was registered, done last.

    Where ranks add products, each part is scaled by its own, and the rest is done once, to the whole sum (`of_parts`,
    `of_sums`): a kernel that adds does it in fp32 before it rounds; where a library adds, to what that rounded.
    """

    bias: bool = False
    activation: Activation | None = None
    residual: bool = False
    scaling: Scaling | None = None
    gate: bool = False
    more: tuple[Applied, ...] | UnsetType = UNSET

    @property
    def added(self) -> tuple[Applied, ...]:
        """The epilogues that were registered, in the order in which they are done."""
        return self.more or ()

    @property
    def bits(self) -> int:
        """What a kernel is compiled for; 0: nothing is done."""
        words = (BIAS * self.bias, self.activation, GATE * self.gate, RESIDUAL * self.residual, self.scaling, ADDED)
        return sum(EPILOGUE_BITS[word] for word in words[: None if self.more else -1] if word)

    @property
    def products(self) -> int:
        """How many products it reads, of one shape."""
        return 2 if self.gate else 1

    @property
    def makes(self) -> tuple[str, ...]:
        """The results that it leaves beside the product."""
        return ()

    @property
    def of_parts(self) -> Epilogue:
        """What is done to each part of a sum."""
        return Epilogue(scaling=self.scaling) if self.scaling else NO_EPILOGUE

    @property
    def of_sums(self) -> Epilogue:
        """What is done to a sum of such parts once it is whole."""
        return replace(self, scaling=None) if self.bits else NO_EPILOGUE

    @property
    def inputs(self) -> tuple[str, ...]:
        """The tensors of the caller's that it reads and no schedule moves. The scales of rows are moved."""
        scales = {None: (), "tensor": (SCALE_X, SCALE_W), "rows": (SCALE_W,)}[self.scaling]
        own = (BIAS,) * self.bias + (RESIDUAL,) * self.residual + (GATE,) * self.gate + scales
        return own + tuple(read.name for each in self.added for read in registered(each.name).inputs)

    @property
    def reads_rows(self) -> bool:
        """Whether it reads at the rows of the result, where it is stored."""
        return any(read is not None and read.rows == "y" for read in map(input_of, self.inputs))

    def __str__(self) -> str:
        scaled = f"scaled by {self.scaling}" if self.scaling else ""
        words = (scaled, BIAS * self.bias, self.activation, GATE * self.gate, RESIDUAL * self.residual)
        return "+".join([*(word for word in words if word), *map(str, self.added)])


NO_EPILOGUE = Epilogue()


class Norm(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is done to each row of a sum once it is whole: `z = y + residual`, then `z / rms(z) * norm_weight`.

    rms: `sqrt(mean(z ** 2) + eps)`. residual: whether there is one, `[m, n]`; norm_weight is `[1, n]`. `y` holds what
    was normed, `z` is a second output. Rounded are the sum, z and the result, in kernels as in the library.
    """

    eps: Annotated[float, Meta(gt=0)]
    residual: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The tensors of the caller's that it reads."""
        return (NORM_WEIGHT,) + (RESIDUAL,) * self.residual

    @property
    def makes(self) -> tuple[str, ...]:
        """The results that it leaves beside the normed rows: those before."""
        return (Z,)

    def __str__(self) -> str:
        return f"{'residual+' * self.residual}rms_norm eps={self.eps!r}"
