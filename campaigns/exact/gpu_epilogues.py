"""Is what follows a product right on GPUs, in every plan, in every call and when tensors move?

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_epilogues [--forms silu norm] [--sizes 1] [--only push]

What follows: bias, activation and residual, a gate, several weights, a norm, the scales of fp8; of every operator that
offers it, in every method that has it (campaigns/cases.py). --only: plans that contain this text, the operator before
them, such as `matmul_all_reduce two_shot`. --forms: what contains one of these words. Every plan meets two sets of
tensors by turns. Whole numbers must come out to the bit where nothing is rounded twice; else results are compared with
fp32, a few roundings of bf16 allowed, also of what a library rounds in between. Results of an all-reduce must have the
same bits on every rank, one of several weights those that it has alone, and rows that are normed are also replayed from
a graph. Last, the error of fp8 at layers of models, of the chosen plan and of the first kernels: at most 1.05 times
that of torch's scaled matmul, both against fp64. How quick fp8 is: `overweave bench OPERATOR --dtype fp8`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
import torch.distributed as dist

from campaigns.cases import IN_KERNELS, OF_FP8, OPERATORS, Named
from campaigns.exact.calls import FORMS, FP8, Case, Form, captured, device, error_ratio, make_inputs, results, wrong
from campaigns.exact.gpu_exactness import ERROR_RATIO
from campaigns.gpu_ranks import Check, arguments, run_campaign, sharers, spread_over
from overweave.errors import InputError
from overweave.ir.operators.registry import OPERATORS as RECORDS
from overweave.schedules.records.needs import obstacle
from overweave.schedules.records.record import MethodRequest
from overweave.tuner.space.shapes import read_shapes
from overweave.tuner.space.target import Target

Sizes = tuple[int, int, int]  # m, n, k
# Ragged rows, and a last step of k that is not whole.
SIZES: tuple[Sizes, ...] = ((1000, 1312, 528), (2048, 2752, 1040))
NORMED_SIZES: tuple[Sizes, ...] = ((1, 4096, 512), (5, 1304, 520), (1000, 8192, 512), (2048, 5120, 1024))
# Layers at which the error of fp8 is measured, of benchmarks/shapes; and of so many of their columns.
LAYERS = (
    ("mlp", "MLP-5", Form(scaling="rows")),
    ("weights", "Llama-3-8B.gate_up.m=8192", Form(activation="silu", gate=True, scaling="rows")),
)
CHECKED_COLUMNS, CHECKED_PLANS = 256, 4
Call = Callable[[], tuple[torch.Tensor, ...]]


def cases(named: Named, forms: Sequence[Form], count: int, known: Sequence[Sizes] = SIZES) -> Iterator[Case]:
    """A plan with all that may follow, in `count` of the sizes. The weight lies in both ways by turns."""
    for index, form in enumerate(form for form in forms if form.suits(RECORDS[named.operator])):
        for sizes in spread_over(NORMED_SIZES if form.norm else known, count):
            dtype = FP8 if form.scaling else torch.bfloat16
            case = Case(named.operator, *sizes, dtype, bool(form.scaling) or index % 2 == 0, named.plan, form)
            asked = MethodRequest(case.problem(dist.get_world_size()), named.options, Target(device().type))
            if not obstacle(asked, named.method, "device"):
                yield case


def outcomes(named: Named, forms: Sequence[Form], count: int, known: Sequence[Sizes] = SIZES) -> Iterator[str]:
    """What is wrong with each call of each case of a plan; empty where nothing is: two sets of tensors by turns."""
    for case in cases(named, forms, count, known):
        try:
            yield from _of_case(named, case)
        except InputError as error:
            yield f"{case}: {error}"


def _of_case(named: Named, case: Case) -> Iterator[str]:
    form = case.form
    for exact in (True, False) if form.weights > 1 and not form.scaling else (form.is_exact,):
        both = [make_inputs(case, seed, exact) for seed in (1, 2)]
        calls = [partial(results, case, inputs) for inputs in both]
        ways: list[Sequence[Call]] = [calls]
        by_library = named.method.is_plain or named.method.has_library_beside
        if form.norm and not (by_library and sharers() > 1):  # what gloo does no graph holds
            ways.append([captured(call) for call in calls])
        for way, turn in product(ways, range(4)):
            found = wrong(case, both[turn % 2], exact, way[turn % 2]())
            yield f"{case} {'exact' if exact else 'floats'} call {turn}: {found}" if found else ""


def errors_of_fp8(operator: str) -> Iterator[str]:
    """What is too far from the truth at the layers that an operator has."""
    plans = [named.plan for named in IN_KERNELS if named.operator == operator and named.method.is_fused]
    for shapes, name, form in LAYERS:
        if not form.suits(RECORDS[operator]):
            continue
        for shape in (case for case in read_shapes(shapes, operator).cases if case.name == name):
            own = shape.problem(operator, dist.get_world_size(), "bf16")
            for plan in (None, *plans)[:CHECKED_PLANS]:
                case = Case(operator, own.m, own.n, own.k, FP8, True, plan, form)
                ratio = error_ratio(case, 1, CHECKED_COLUMNS)
                yield "" if ratio <= ERROR_RATIO else f"{name} {plan}: error {ratio:.3f} of torch's"


def checks(asked: argparse.Namespace) -> Iterator[Check]:
    """A line for each plan."""
    forms = [form for form in FORMS if any(word in str(form) for word in asked.forms)]
    scaled = [form for form in forms if form.scaling]
    for named in (*IN_KERNELS, *OF_FP8):
        own = scaled if named in OF_FP8 else forms
        yield Check(f"{named.operator} {named.plan}", partial(outcomes, named, own, asked.sizes))
    for operator in OPERATORS if scaled else ():
        yield Check(f"{operator}: error of fp8 beside torch's", partial(errors_of_fp8, operator))


def main() -> None:
    parser = arguments(__doc__ or "", deadline_s=60)
    parser.add_argument("--forms", nargs="+", default=[""], help="what follows the product: each compiles kernels")
    parser.add_argument("--sizes", type=int, default=len(NORMED_SIZES), help="how many of the sizes")
    run_campaign(parser, checks)


if __name__ == "__main__":
    main()
