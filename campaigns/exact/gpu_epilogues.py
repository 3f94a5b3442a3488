"""Is what follows a product right on GPUs, in every plan, in every call and when tensors move?

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_epilogues [--forms silu norm] [--sizes 1] [--only push]

What follows: bias, activation and residual, a gate, several weights, a norm; of every operator that offers it, in every
method that has it. --only: plans that contain this text, the operator before them, such as `matmul_all_reduce
two_shot`. --forms: what contains one of these words. Every plan meets two sets of tensors by turns. Whole numbers must
come out to the bit where nothing is rounded twice; else results are compared with fp32, a few roundings of bf16
allowed, also of what a library rounds in between. Results of an all-reduce must have the same bits on every rank, one
of several weights those that it has alone, and rows that are normed are also replayed from a graph.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import product

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.cases import IN_KERNELS, Named
from campaigns.exact.calls import FP8, Case, Form, captured, device, make_inputs, results, wrong
from campaigns.gpu_ranks import join, report, sharers, spread_over
from overweave.errors import InputError
from overweave.ir.operators.registry import OPERATORS
from overweave.schedules.methods.record import Asked
from overweave.schedules.methods.validity import obstacle
from overweave.tuner.space.target import Target

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
FORMS = (
    *(Form(bias=True, activation=activation, residual=True) for activation in (None, *ACTIVATIONS)),
    *(
        Form(activation=activation, residual=residual, gate=True)
        for activation, residual in product((None, *ACTIVATIONS), (False, True))
    ),
    *(Form(bias=True, weights=count) for count in (2, 3)),
    *(Form(norm=True, residual=residual) for residual in (False, True)),
)
SIZES = ((1000, 1304, 520), (2048, 2752, 1024))  # m, n, k
NORMED_SIZES = ((1, 4096, 512), (5, 1304, 520), (1000, 8192, 512), (2048, 5120, 1024))
Sizes = tuple[int, int, int]
Call = Callable[[], tuple[torch.Tensor, ...]]


def cases(named: Named, forms: Sequence[Form], count: int, known: Sequence[Sizes] = SIZES) -> Iterator[Case]:
    """A plan with all that may follow, in `count` of the sizes. The weight lies in both ways by turns."""
    for index, form in enumerate(form for form in forms if form.suits(OPERATORS[named.operator])):
        for sizes in spread_over(NORMED_SIZES if form.norm else known, count):
            dtype = FP8 if form.scaling else torch.bfloat16
            case = Case(named.operator, *sizes, dtype, bool(form.scaling) or index % 2 == 0, named.plan, form)
            asked = Asked(case.problem(dist.get_world_size()), named.options, Target(device().type))
            if not obstacle(asked, named.method, "device"):
                yield case


def failures(named: Named, case: Case) -> Iterator[str]:
    """What is wrong with each call of a case, or nothing of each that is right: two sets of tensors by turns."""
    form = case.form
    for exact in (True, False) if form.weights > 1 and not form.scaling else (form.is_exact,):
        both = [make_inputs(case, seed, exact) for seed in (1, 2)]
        calls = [partial(results, case, inputs) for inputs in both]
        ways: list[Sequence[Call]] = [calls]
        if form.norm and not (named.method.is_plain and sharers() > 1):  # what gloo does no graph holds
            ways.append([captured(call) for call in calls])
        for way, turn in product(ways, range(4)):
            found = wrong(case, both[turn % 2], exact, way[turn % 2]())
            yield f"{case} {'exact' if exact else 'floats'} call {turn}: {found}" if found else ""


def check(named: Named, chosen: Sequence[Case]) -> None:
    """A line for a plan."""
    started, found = time.monotonic(), list[str]()
    for case in chosen:
        try:
            found += failures(named, case)
        except InputError as error:
            found.append(f"{case}: {error}")
    report.line(f"{named.operator} {named.plan}", len(found), [each for each in found if each], started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", default=[""], help="what follows the product: each compiles kernels")
    parser.add_argument("--sizes", type=int, default=len(NORMED_SIZES), help="how many of the sizes")
    parser.add_argument("--only", default="", help="plans that contain this text, the operator before them")
    arguments = parser.parse_args()
    forms = [form for form in FORMS if any(word in str(form) for word in arguments.forms)]
    join(timedelta(seconds=60))
    for named in IN_KERNELS:
        if arguments.only in f"{named.operator} {named.plan}":
            check(named, list(cases(named, forms, arguments.sizes)))
    ow.check()
    report.finish()


if __name__ == "__main__":
    main()
