"""Epilogues: what a kernel does to each element of a product before it stores it, or to each row of a sum."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from functools import lru_cache
from math import inf
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from overweave.ir.operators.forms import (
    BIAS,
    GATE,
    NORM_WEIGHT,
    RESIDUAL,
    SCALE_W,
    SCALE_X,
    Activation,
    Form,
    Scaling,
    Z,
    input_of,
    registered,
)

MOST_NORM_COLS = 1 << 16  # a whole row is one tile of the reduction kernel
EpilogueStage = Literal["part", "pair", "sum"]


class Applied(Struct, frozen=True, forbid_unknown_fields=True):
    """A registered form (`Form`), by its name, with the numbers that a call passes for it.

    of_parts: it is done to each rank's product, before products are added.
    """

    name: str
    numbers: tuple[float, ...] = ()
    of_parts: bool = False

    @property
    def form(self) -> Form:
        """The record. Raises InputError if nobody has registered it."""
        return registered(self.name)

    @property
    def by_name(self) -> dict[str, float]:
        """The numbers by their names."""
        return dict(zip(self.form.numbers, self.numbers, strict=True))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the caller's tensors that it reads."""
        return tuple(read.name for read in self.form.inputs)

    @property
    def makes(self) -> tuple[str, ...]:
        """Return the names of the results that it leaves beside the product."""
        return tuple(made.name for made in self.form.makes)

    @property
    def places(self) -> tuple[str, ...]:
        """Return, of whole rows, the names of what holds their elements, the rows before, and their numbers."""
        return (self.makes[0], "y", *self.makes[1:])

    def __str__(self) -> str:
        numbers = "".join(f" {name}={number!r}" for name, number in self.by_name.items())
        return f"{self.name}{numbers}{' of parts' * self.of_parts}"


def applied(form: Form, numbers: Iterable[float], adds: bool) -> Applied:
    """Return a registered form as an operator does it. adds: whether the operator adds products of ranks."""
    return Applied(form.name, tuple(map(float, numbers)), adds and "part" in form.where and "sum" not in form.where)


def told_apart(added: Sequence[Applied]) -> tuple[tuple[Applied, ...] | UnsetType, Applied | UnsetType]:
    """Return `Epilogue.more` and `Problem.rows`: of several forms of whole rows, the first."""
    rows = next((each for each in added if each.form.of_row), UNSET)
    return tuple(each for each in added if each is not rows) or UNSET, rows


class Step(NamedTuple):
    """One of the forms that an epilogue is made of, in their order.

    stage: what it is done to: each product, before any are added; each of two products, of which one is a gate, until
    one is made of both; or what is stored at last. of_gate: of both it is done to the gate's.
    """

    applied: Applied
    stage: EpilogueStage
    of_gate: bool = False


class Epilogue(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is done to each element of a product before it is stored: `activation(scaled(y) + bias) + residual`.

    scaling: y is multiplied by `scale_x * scale_w`, fp32.
    tensor: one of each, `[1, 1]`; ranks that gather rows from one another must pass the same `scale_x`.
    rows: `scale_x` for each row of x, `[m/W, 1]` with its owner, or `[m, 1]` where x holds all rows, and `scale_w [1,
    n]` for each column of w. Of a sum over ranks each rank's product is scaled by its own.
    bias: `[n]` is added.
    activation: as torch.nn.functional names them; gelu_tanh is its `approximate="tanh"`.
    residual: `[m, n]` is added. A kernel computes all of it in fp32 and rounds once; torch rounds at each step.
    gate: `y * activation(a @ gate) + residual` instead, without bias, for a second weight `gate [k, n]` of the layout
    of the first: both products of a tile are computed from the same rows of `a`. scale_w has the gate's scales behind
    those of the first weight: two elements, `[1, 2]`, or `[1, 2n]`.
    gating: (limit, slope, shift), of a gate: it is at most the limit and y within it, silu(g) is `g * sigmoid(slope *
    g)`, and `y + shift` is multiplied. Beside a gate biases are of both, `[2, n]`, the gate's last (grouped matmuls).
    more: what was registered, done last, or, of parts, next to the scaling.

    If products are summed over ranks, each is scaled by its own scales, and what is of parts is done to it
    (`part_epilogue`). The rest is applied once to the whole sum (`sum_epilogue`): by the kernel that adds, in fp32
    before it rounds, or by torch after NCCL has rounded.
    """

    bias: bool = False
    activation: Activation | None = None
    residual: bool = False
    scaling: Scaling | None = None
    gate: bool = False
    gating: tuple[float, float, float] | UnsetType = UNSET
    more: tuple[Applied, ...] | UnsetType = UNSET

    @classmethod
    def of(cls, words: Container[str], **others: Any) -> Epilogue:
        """Return the epilogue that reads the inputs that `words` name. others: fields that are no inputs."""
        return cls(bias=BIAS in words, residual=RESIDUAL in words, gate=GATE in words, **others)

    @property
    def added(self) -> tuple[Applied, ...]:
        """The epilogues that were registered, in the order in which they are done."""
        return self.more or ()

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return all that it does to an element, in order; none if it is bare."""
        return _steps_of(self)

    @property
    def products(self) -> int:
        """Return how many products of one shape it reads."""
        return 2 if self.gate else 1

    @property
    def part_epilogue(self) -> Epilogue:
        """Return what is applied to each rank's product before the sum over ranks."""
        of_parts = tuple(each for each in self.more if each.of_parts) if self.more else ()
        return Epilogue(scaling=self.scaling, more=of_parts or UNSET) if self.scaling or of_parts else NO_EPILOGUE

    @property
    def of_each_part(self) -> Epilogue:
        """Return the same, where every product is a part: what may be done to parts is."""
        more = tuple(replace(each, of_parts="part" in each.form.where) for each in self.added)
        return replace(self, more=more or UNSET)

    @property
    def sum_epilogue(self) -> Epilogue:
        """Return what is applied once to the whole sum over ranks."""
        last = tuple(each for each in self.more if not each.of_parts) if self.more else ()
        return replace(self, scaling=None, more=last or UNSET) if self.steps else NO_EPILOGUE

    @property
    def inputs(self) -> tuple[str, ...]:
        scales = {None: (), "tensor": (SCALE_X, SCALE_W), "rows": (SCALE_W,)}[self.scaling]
        own = (BIAS,) * self.bias + (RESIDUAL,) * self.residual + (GATE,) * self.gate + scales
        return own + tuple(name for each in self.added for name in each.inputs)

    @property
    def reads_rows(self) -> bool:
        """Whether it reads at the rows of the result, where it is stored."""
        return any(read is not None and read.rows == "y" for read in map(input_of, self.inputs))

    def __str__(self) -> str:
        scaled = f"scaled by {self.scaling}" if self.scaling else ""
        gate = " ".join([GATE, *(f"{number:g}" for number in self.gating or ())]) if self.gate else ""
        words = (scaled, BIAS * self.bias, self.activation, gate, RESIDUAL * self.residual)
        return "+".join([*(word for word in words if word), *map(str, self.added)])


NO_EPILOGUE = Epilogue()


class Norm(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """RMSNorm of each row of a sum once it is whole: `z = y + residual`, then `z / rms(z) * norm_weight`.

    rms: `sqrt(mean(z ** 2) + eps)`. residual: whether there is one, `[m, n]`; norm_weight is `[1, n]`. Output `y` holds
    the normed rows, `z` is a second output. The sum, z and the result are rounded, in kernels as in torch.
    """

    eps: Annotated[float, Meta(gt=0)]
    residual: bool = False

    makes: ClassVar[tuple[str, ...]] = (Z,)
    places: ClassVar[tuple[str, ...]] = ("y", Z)  # as of `Applied`

    @property
    def inputs(self) -> tuple[str, ...]:
        return (NORM_WEIGHT,) + (RESIDUAL,) * self.residual

    def __str__(self) -> str:
        return f"{'residual+' * self.residual}rms_norm eps={self.eps!r}"


@lru_cache(maxsize=1024)
def _steps_of(epilogue: Epilogue) -> tuple[Step, ...]:
    """Return `Epilogue.steps`, which every call on CPU ranks asks for."""
    sides = (False, True) if epilogue.gate else (False,)
    bias: list[str] = [BIAS] * epilogue.bias
    activation: list[str] = [epilogue.activation] if epilogue.activation else []
    steps = [Step(Applied(epilogue.scaling), "part", of_gate) for of_gate in sides] if epilogue.scaling else []
    steps += [Step(each, "part") for each in epilogue.added if each.of_parts]
    if epilogue.gate:
        steps += [Step(Applied("bias of both"), "pair", of_gate) for of_gate in sides for _ in bias]
        steps += [*_gating(activation, epilogue.gating or (inf, 1.0, 0.0)), Step(Applied(GATE), "pair")]
        bias = activation = []
    behind = [Applied(each) for each in (*bias, *activation, *[RESIDUAL] * epilogue.residual)]
    return (*steps, *(Step(each, "sum") for each in (*behind, *epilogue.added) if not each.of_parts))


def _gating(activation: list[str], numbers: tuple[float, float, float]) -> Iterator[Step]:
    """Yield what is done to both products before they are multiplied. numbers: `Epilogue.gating`."""
    limit, slope, shift = numbers
    if limit < inf:
        yield Step(Applied("within", (limit,)), "pair")
        yield Step(Applied("at most", (limit,)), "pair", True)
    if slope != 1.0:  # g * sigmoid(slope * g) is silu(slope * g) / slope
        yield Step(Applied("times", (slope,)), "pair", True)
    yield from (Step(Applied(each), "pair", True) for each in activation)
    if slope != 1.0:
        yield Step(Applied("times", (1.0 / slope,)), "pair", True)
    if shift:
        yield Step(Applied("plus", (shift,)), "pair")
