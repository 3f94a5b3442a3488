"""Is fp8 right on GPUs, how far from the truth beside torch's scaled matmul, and how much quicker than bf16?

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_fp8
    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_fp8 --operator matmul_reduce_scatter
    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_fp8 --no-times      (bits and errors only)

Integers first, whose every sum is exact, in every plan and with tensors that move; then random numbers against fp64;
then MLP-5 and MLP-6 (benchmarks/shapes) beside bf16, interleaved. Where rows are gathered, all of it again with a gate
and scales of its own, at a layer of Llama-3. It fails where a bit is wrong, where the error is more than 1.05 of
torch's, or where fp8 as overweave chooses to run it is not as much quicker than bf16 as it should: 1.4 times where rows
are gathered, at all where sums travel, in as many bytes as those of bf16, and where there is a gate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from campaigns.cases import ALL_GATHER, HOPPER, IN_KERNELS, OPERATORS, PORTABLE, Named
from campaigns.exact.calls import FP8, Case, Form, Inputs, error_ratio, make_inputs, run
from campaigns.exact.gpu_epilogues import cases, check
from campaigns.exact.gpu_exactness import ERROR_RATIO
from campaigns.gpu_ranks import join, report
from overweave.ir.operators.registry import operator_of
from overweave.tuner.measure.statistics import median
from overweave.tuner.measure.timer import Call, Effort, compare
from overweave.tuner.space.shapes import read_shapes

TIMED = ("MLP-5", "MLP-6")
SIZES = ((1000, 1312, 528), (3000, 2752, 1040))  # m, n, k: ragged rows, and a last step of k that is not whole
GATE_UP = "Llama-3-8B.gate_up.m=8192"  # of benchmarks/shapes/weights.*
CHECKED_COLUMNS = 256  # of a product that is held against fp64
EFFORT = Effort(rounds=20, warmup=4, host_calls=0)
BY_ROWS, SWIGLU = Form(scaling="rows"), Form(scaling="rows", gate=True, activation="silu")
FORMS = (
    *(Form(scaling=scaling, gate=gate) for scaling in ("rows", "tensor") for gate in (False, True)),
    Form(scaling="rows", weights=3),
    Form(scaling="rows", out_dtype=torch.float16),
)
# Beside every method in every kernel: an option that changes what a kernel of fp8 does.
MORE = (
    *(Named(ALL_GATHER, f"push split_k=2 {kernel}") for kernel in (HOPPER, PORTABLE)),
    Named("matmul_reduce_scatter", f"scatter {HOPPER} own_pieces=2"),
)


def speed_ratio(operator: str, form: Form) -> float:
    """How many times as fast as bf16 fp8 must be."""
    return 1.4 if operator_of(operator).gathers and not form.gate else 1.0


def plans(operator: str) -> list[Named]:
    """Those of an operator; a GPU alone runs the library's and the first two kernels."""
    own = [named for named in (*IN_KERNELS, *MORE) if named.operator == operator]
    fused = [named for named in own if named.method.is_fused]
    return own if dist.get_world_size() > 1 else [own[0], *fused[:2]]


def layers(operator: str, name: str) -> Iterator[Case]:
    """One rank's matmul of the named cases of the shape sets, in fp8."""
    for shapes in ("mlp", "weights") if operator == ALL_GATHER else ("mlp",):
        for case in read_shapes(shapes, operator).cases:
            if case.name == name:
                own = case.problem(operator, dist.get_world_size(), "bf16")
                yield Case(operator, own.m, own.n, own.k, FP8, True)


def check_errors(case: Case) -> None:
    """The chosen plan and the first kernels against fp64 on the same fp8 numbers, beside torch's scaled matmul."""
    started, failures = time.monotonic(), []
    chosen = [None, *(named.plan for named in plans(case.operator) if named.method.is_fused)][:4]
    for plan in chosen:
        ratio = error_ratio(case._replace(plan=plan), 1, CHECKED_COLUMNS)
        if not ratio <= ERROR_RATIO:
            failures.append(f"{plan}: error {ratio:.3f} of torch's")
        if dist.get_rank() == 0:
            print(f"    error of {plan or 'the chosen plan'}: {ratio:.3f} of torch's", flush=True)
    report.line(f"error of {case.form} at {case.m}x{case.n}x{case.k}", len(chosen), failures, started)


def check_times(name: str, case: Case) -> None:
    """fp8 as it is chosen, and by plans, beside bf16, interleaved; without a gate also the two matmuls alone."""
    started, inputs = time.monotonic(), make_inputs(case, 1, exact=False)
    in_bf16 = case._replace(dtype=torch.bfloat16, form=case.form._replace(scaling=""))
    wide = make_inputs(in_bf16, 1, exact=False)
    methods: dict[str, Call] = {"bf16": partial(_call, in_bf16, wide), "fp8": partial(_call, case, inputs)}
    if case.form == BY_ROWS:
        one = torch.ones((), device=inputs.w.device)
        scaled = partial(torch._scaled_mm, inputs.gathered, inputs.w, one, one, out_dtype=torch.bfloat16)
        methods["bf16 matmul alone"] = lambda turn: torch.mm(wide.gathered, wide.w)
        methods["fp8 matmul alone"] = lambda turn: scaled()
    for named in plans(case.operator)[:6]:
        if not named.method.has_messages:
            methods[f"fp8 {named.plan}"] = partial(_call, case._replace(plan=named.plan), inputs)
    for call in methods.values():
        call(0)
    device = torch.device("cuda", torch.cuda.current_device())
    samples = compare(methods, device, dist.group.WORLD, EFFORT).device_us
    times = {method: median(us) for method, us in samples.items()}
    gain, least = times["bf16"] / times["fp8"], speed_ratio(case.operator, case.form)
    failures = [] if gain >= least else [f"{name}: fp8 is {gain:.3f} times as fast as bf16"]
    if dist.get_rank() == 0:
        print("\n".join(f"    {name} {method:46s} {us:9.1f} us" for method, us in times.items()), flush=True)
    report.line(f"{name}: fp8 {gain:.3f} times as fast as bf16", 1, failures, started)


def _call(case: Case, inputs: Inputs, turn: int) -> torch.Tensor:
    return run(case, inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operator", choices=(*OPERATORS, "all"), default=ALL_GATHER, help="one, or all three")
    parser.add_argument("--no-times", action="store_true", help="leave out what is timed beside bf16")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of the sizes must be exact")
    arguments = parser.parse_args()
    join(timedelta(seconds=60))
    for operator in OPERATORS if arguments.operator == "all" else (arguments.operator,):
        if dist.get_rank() == 0:
            print(operator, flush=True)
        for named in plans(operator):
            check(named, list(cases(named, FORMS, arguments.sizes, SIZES)))
        forms = (BY_ROWS, SWIGLU) if operator == ALL_GATHER else (BY_ROWS,)
        for form in forms:
            for name in (GATE_UP,) if form.gate else TIMED:
                for case in layers(operator, name):
                    if name != TIMED[1]:
                        check_errors(case._replace(form=form))
                    if not arguments.no_times:
                        check_times(name, case._replace(form=form))
    report.finish()


if __name__ == "__main__":
    main()
