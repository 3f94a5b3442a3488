"""Calls of the operators as data: what a rank passes, what must come back, and what is wrong with a result.

A call is made through the public function of its operator. Data are whole numbers whose every sum and product is exact
in 16 bits, in any order, or normal numbers, which are compared with fp32 or fp64. On GPUs where there are any.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch.nn.functional import rms_norm

import overweave as ow
from campaigns.cases import Named
from overweave.ir.epilogue import Epilogue, Norm
from overweave.ir.operators.record import Operator
from overweave.ir.operators.registry import operator_of
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.shards import shard_rows
from overweave.schedules.catalog.catalog import build
from overweave.tuner.measure.baselines import SEQUENTIAL

NON_ZEROS = 32  # in a row of x along the whole k
TOLERANCE = 2**-6  # of bf16, which rounds by up to 2**-9: a library does so four times at most
ROUNDING = 2**-8  # of bf16, and a little for the order in which squares are added
EPS = 1e-5
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
FP8 = torch.float8_e4m3fn


class Form(NamedTuple):
    """What follows a product. scaling: of fp8 operands, by `rows` or one for the `tensor`.

    weights: over one gather. out_dtype: of the result, where that is not what is usual. gathered: whether what was
    gathered comes back as well, last.
    """

    bias: bool = False
    activation: str | None = None
    residual: bool = False
    gate: bool = False
    scaling: str = ""
    weights: int = 1
    norm: bool = False
    out_dtype: torch.dtype | None = None
    gathered: bool = False

    def __str__(self) -> str:
        scaled, several = f"fp8 by {self.scaling}" * bool(self.scaling), f"{self.weights} weights" * (self.weights > 1)
        flags = ("bias", self.bias), (self.activation, True), ("gate", self.gate), ("residual", self.residual)
        words = (scaled, several, *(word for word, holds in flags if holds), "norm" * self.norm)
        words = (*words, "" if self.out_dtype is None else f"into {self.out_dtype}", "gathered" * self.gathered)
        return "+".join(filter(None, words))

    def suits(self, record: Operator) -> bool:
        """Whether an operator offers it."""
        forms = record.forms
        wanted = (
            (self.norm, forms.norm),
            (self.gate, forms.gate),
            (self.weights > 1, forms.several_weights),
            (self.gathered, forms.returns_gathered),
        )
        return all(offered or not asked for asked, offered in wanted)

    @property
    def is_exact(self) -> bool:
        """Whether whole numbers come through it without being rounded, or rounded once alone."""
        return self.activation is None and not (self.gate and self.residual)


BARE = Form()
# What may follow a product, in bf16 and in fp8.
FORMS = (
    *(Form(bias=True, activation=activation, residual=True) for activation in (None, *ACTIVATIONS)),
    *(
        Form(activation=activation, residual=residual, gate=True)
        for activation, residual in product((None, *ACTIVATIONS), (False, True))
    ),
    *(Form(bias=True, weights=count) for count in (2, 3)),
    *(Form(norm=True, residual=residual) for residual in (False, True)),
    *(Form(scaling=scaling, gate=gate) for scaling in ("rows", "tensor") for gate in (False, True)),
    Form(scaling="rows", weights=3),
    Form(scaling="rows", out_dtype=torch.float16),
)


class Case(NamedTuple):
    """The matmul of one rank: `[m, k] @ [k, n]`, m before the scatter or after the gather."""

    operator: str
    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    b_is_transposed: bool = False
    plan: str | None = None
    form: Form = BARE
    columns: tuple[int, ...] = ()  # of each of several weights, where they are others than `widths` takes

    def __str__(self) -> str:
        layout = " b^T" if self.b_is_transposed else ""
        return f"{self.operator}.{self.plan} {self.form} {self.m}x{self.n}x{self.k}{layout} {self.dtype}"

    @property
    def record(self) -> Operator:
        """What the operator is."""
        return operator_of(self.operator)

    @property
    def out_dtype(self) -> torch.dtype:
        """Of the result, and of what is read beside it."""
        return self.form.out_dtype or (torch.bfloat16 if self.form.scaling else self.dtype)

    def problem(self, world_size: int) -> Problem:
        """As the library states it."""
        form, dtype = self.form, str(self.dtype).removeprefix("torch.")
        epilogue = Epilogue(
            bias=form.bias,
            activation=form.activation,  # type: ignore[arg-type]
            residual=form.residual and not form.norm,
            scaling=form.scaling or None,  # type: ignore[arg-type]
            gate=form.gate,
        )
        return Problem(
            operator=self.operator,
            m=self.m,
            n=self.n,
            k=self.k,
            world_size=world_size,
            dtype=dtype,  # type: ignore[arg-type]
            b_is_transposed=self.b_is_transposed,
            epilogue=epilogue,
            norm=Norm(eps=EPS, residual=form.residual) if form.norm else None,
            columns=widths(self) if form.weights > 1 else (),
            returns_gathered=form.gathered,
        )

    @property
    def name(self) -> str:
        """Of the operator and its plan."""
        return f"{self.operator}.{self.plan}"

    def built(self, world_size: int) -> Plan:
        """The plan that it names."""
        named = Named(self.operator, str(self.plan))
        return build(named.full_name, self.problem(world_size), named.options)


class Inputs(NamedTuple):
    """A rank's tensors. w: all weights side by side. gathered: all rows of x, with their scales. scale_w: of all."""

    x: torch.Tensor
    w: torch.Tensor
    gathered: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    gate: torch.Tensor | None = None
    scale_x: torch.Tensor | None = None
    scale_w: torch.Tensor | None = None
    gathered_scale: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_inputs(case: Case, seed: int, exact: bool) -> Inputs:
    """Random inputs of this rank. What all ranks have alike, such as the gathered x, is drawn from a shared seed."""
    rank, world_size, form, record = dist.get_rank(), dist.get_world_size(), case.form, case.record
    shared, own = generator(seed), generator(seed * 64 + rank + 1)
    rows, budget = (shared, NON_ZEROS) if record.gathers else (own, NON_ZEROS // world_size)
    lo, hi = shard_rows(case.m, world_size, rank)
    gathered = _matrix((case.m, case.k), case.dtype, rows, budget if exact else None)
    made = Inputs(gathered[lo:hi].clone() if record.gathers else gathered, _weight(case, own, exact), gathered)
    if form.gate:
        made = made._replace(gate=_weight(case, own, exact))
    if form.scaling:
        made = made._replace(**_scales(case, (rows, own), exact))
    if form.bias:
        made = made._replace(bias=_matrix((1, case.n), case.out_dtype, shared, case.n if exact else None)[0])
    if form.residual:  # the same on every rank, which takes its rows of it
        residual = _matrix((case.m, case.n), case.out_dtype, shared, case.n if exact else None)
        made = made._replace(residual=residual[lo:hi].clone() if record.scatters and record.adds else residual)
    if form.norm:
        made = made._replace(norm_weight=_matrix((1, case.n), case.out_dtype, shared, None)[0])
    return made


def _weight(case: Case, chance: torch.Generator, exact: bool) -> torch.Tensor:
    """What follows a product wants it about as large as one."""
    shape = (case.n, case.k) if case.b_is_transposed else (case.k, case.n)
    w = _matrix(shape, case.dtype, chance, shape[1] if exact else None)
    w = w if exact or case.form == BARE or case.form.scaling else (w / case.k**0.5).to(case.dtype)
    return w.t() if case.b_is_transposed else w


def _scales(case: Case, chances: tuple[torch.Generator, torch.Generator], exact: bool) -> dict[str, torch.Tensor]:
    """Powers of two, small ones where ranks' parts are added: of rows of x, and of columns of w and a gate."""
    by_rows, count = case.form.scaling == "rows", 1 + case.form.gate
    powers = (0, 2) if case.record.adds else (-2, 3)
    shapes = ((case.m, 1), (1, count * case.n)) if by_rows else ((1,), (count,))
    by_row, by_column = (
        2.0 ** torch.randint(*powers, shape, device=chance.device, generator=chance)
        for shape, chance in zip(shapes, chances, strict=True)
    )
    by_column = by_column if exact else by_column / case.k**0.5
    lo, hi = shard_rows(case.m, dist.get_world_size(), dist.get_rank())
    mine = by_row[lo:hi].clone() if case.record.gathers and by_rows else by_row
    return {"scale_x": mine, "scale_w": by_column, "gathered_scale": by_row}


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device=device()).manual_seed(seed)


def _matrix(shape: tuple[int, int], dtype: torch.dtype, chance: torch.Generator, non_zeros: int | None) -> torch.Tensor:
    """Normal numbers, or integers in {-1, 0, 1} with at most `non_zeros` per row other than zero."""
    if non_zeros is None:
        return torch.randn(shape, device=chance.device, generator=chance).to(dtype)
    signs = torch.randint(0, 2, shape, device=chance.device, generator=chance) * 2 - 1
    if shape[1] > non_zeros:
        keep = torch.rand(shape, device=chance.device, generator=chance).argsort(1) < non_zeros
        signs = signs * keep
    return signs.to(dtype)


def widths(case: Case) -> tuple[int, ...]:
    """The columns of each weight: all but the first have few, and of fp8 as many as kernels take."""
    if case.columns:
        return case.columns
    few, others = 48 if case.form.scaling else 40, case.form.weights - 1
    return (case.n - few * others, *(few for _ in range(others)))


def results(case: Case, inputs: Inputs, group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, ...]:
    """What the operator under test gives back: y; z behind it, if rows are normed; products, if weights are several."""
    form = case.form
    named = {"activation": form.activation, "out_dtype": form.out_dtype}
    named |= {name: getattr(inputs, name) for name in ("bias", "residual", "gate", "scale_x", "scale_w")}
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if inputs.norm_weight is not None:
        given["norm"] = ow.RmsNorm(inputs.norm_weight, given.pop("residual", None), EPS)
    w: Any = inputs.w
    if form.weights > 1:
        parts = inputs.w.split(widths(case), dim=1)
        w = parts if case.b_is_transposed else [part.contiguous() for part in parts]
    if case.record.has_row_shards:
        given["m"] = case.m
    if form.gathered:
        given["return_gathered"] = True
    call: Callable[..., Any] = getattr(ow, case.operator)
    found = call(inputs.x, w, group, plan=case.plan, **given)
    if form.gathered and form.weights > 1:
        return *found[0], found[1]
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def run(case: Case, inputs: Inputs, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The first result of the operator under test."""
    return results(case, inputs, group)[0]


def products(case: Case, inputs: Inputs, dtype: torch.dtype) -> list[torch.Tensor]:
    """x by the weights, and by the gate, in `dtype` arithmetic: summed over ranks where ranks add, this rank's rows."""
    record, found = case.record, []
    x = (inputs.gathered if record.gathers else inputs.x).to(dtype)
    for index, w in enumerate([inputs.w] if inputs.gate is None else [inputs.w, inputs.gate]):
        product = x @ w.to(dtype)
        if inputs.scale_w is not None and inputs.gathered_scale is not None:
            scales = inputs.scale_w.to(dtype).chunk(1 + case.form.gate, dim=-1)
            product = product * inputs.gathered_scale.to(dtype) * scales[index]
        if record.adds:
            dist.all_reduce(product)
        lo, hi = shard_rows(case.m, dist.get_world_size(), dist.get_rank())
        found.append(product[lo:hi] if record.adds and record.scatters else product)
    return found


def expected(case: Case, inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """The result in `dtype` arithmetic, without rounding between ranks; before a norm, if there is one."""
    y, *gate = products(case, inputs, dtype)
    y = y if inputs.bias is None else y + inputs.bias.to(dtype)
    activate = ACTIVATIONS[case.form.activation] if case.form.activation else lambda value: value
    y = y * activate(gate[0]) if gate else activate(y)
    return y if inputs.residual is None else y + inputs.residual.to(dtype)


def wrong(case: Case, inputs: Inputs, exact: bool, found: tuple[torch.Tensor, ...]) -> str:
    """What is wrong with a call's results; empty if nothing is. exact: the inputs are whole numbers. Collective."""
    form = case.form
    truth = expected(case, inputs, torch.float32)
    y = found[-1] if form.norm else torch.cat(found, dim=1)
    if exact and form.is_exact:
        if not torch.equal(y, truth.to(y.dtype)):
            return f"not exact, off by {float((y.float() - truth).abs().max()):.2e}"
    else:
        first, *gate = (each.abs() for each in products(case, inputs, torch.float32))
        rounded = first * (gate[0] + 1) if gate else first
        error = ((y.float() - truth).abs() / (truth.abs() + rounded + 1)).max() if y.numel() else torch.zeros(())
        if not float(error) < TOLERANCE:
            return f"error {float(error):.2e}"
    if form.norm and inputs.norm_weight is not None:
        normed = rms_norm(y.double(), (y.shape[1],), inputs.norm_weight.double(), EPS)
        off = float(((found[0].double() - normed).abs() / (normed.abs() + 1e-3)).max())
        if not off <= ROUNDING:
            return f"norm off by {off:.2e}"
    if case.record.shares_sums:
        first_rank = found[0].clone()
        dist.broadcast(first_rank, 0)
        return "" if torch.equal(first_rank, found[0]) else "other bits than on the first rank"
    return _unlike_alone(case, inputs, found) if form.weights > 1 else ""


def _unlike_alone(case: Case, inputs: Inputs, found: tuple[torch.Tensor, ...]) -> str:
    """Which of several products of a tile kernel has other bits than a call of its own."""
    if not Named(case.operator, str(case.plan)).method.is_fused or case.form.scaling:
        return ""
    start = 0
    for index, y in enumerate(found):
        columns = slice(start, start := start + y.shape[1])
        w, bias = inputs.w[:, columns], None if inputs.bias is None else inputs.bias[columns].clone()
        own = inputs._replace(w=w if case.b_is_transposed else w.contiguous(), bias=bias)
        if not torch.equal(run(case._replace(form=case.form._replace(weights=1)), own), y):
            return f"weight {index} has other bits than alone"
    return ""


def error_ratio(case: Case, seed: int, columns: int | None = None) -> float:
    """Our error over that of the library path, both against fp64, in the 2-norm over all ranks."""
    inputs, first = make_inputs(case, seed, exact=False), slice(columns)
    truth = expected(case, _cut(case, inputs, first), torch.float64)
    ours, theirs = (run(one, inputs)[:, first].double() for one in (case, case._replace(plan=SEQUENTIAL)))
    squares = torch.stack([((result - truth) ** 2).sum() for result in (ours, theirs)])
    dist.all_reduce(squares)
    return float((squares[0] / squares[1].clamp(min=1e-30)).sqrt())


def _cut(case: Case, inputs: Inputs, first: slice) -> Inputs:
    """What the first columns of a result come from."""
    scale_w = inputs.scale_w
    if scale_w is not None and case.form.scaling == "rows":
        scale_w = torch.cat([part[:, first] for part in scale_w.chunk(1 + case.form.gate, dim=1)], dim=1)
    bias, residual, gate = (
        None if tensor is None else tensor[..., first] for tensor in (inputs.bias, inputs.residual, inputs.gate)
    )
    return inputs._replace(w=inputs.w[:, first], scale_w=scale_w, bias=bias, residual=residual, gate=gate)


def captured(call: Callable[[], tuple[torch.Tensor, ...]]) -> Callable[[], tuple[torch.Tensor, ...]]:
    """The call as a graph. Its results lie where the capture put them, and are NaN before each replay."""
    call()  # binds the plan: nothing compiles or allocates slots under capture
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()

    def replay() -> tuple[torch.Tensor, ...]:
        for result in found:
            result.fill_(float("nan"))
        graph.replay()
        return found

    return replay
