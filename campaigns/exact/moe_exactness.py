"""Are layers of experts right, wherever tokens go? Every part against a loop over pairs in plain torch, bit by bit.

    python -m campaigns.moe_exactness --worlds 2 3 4 8 --cases 60
    TRITON_INTERPRET=1 python -m campaigns.moe_exactness --worlds 2 3 4 --cases 6    (by the kernels, interpreted)
    torchrun --standalone --nproc-per-node 2 -m campaigns.moe_exactness --cases 60    (on GPUs, in bf16)

Whole numbers whose every sum is exact: results and gradients are bit-equal. Tokens go to experts evenly, by Zipf's law,
all to one, to none, or anywhere, the same expert twice too; ranks have unlike numbers of tokens, some none; experts are
fewer than ranks, or more.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist

from campaigns.cpu_ranks import run_on_any_ranks
from campaigns.exact.interpreted_moe import is_asked_for, kernels_on_cpu
from campaigns.gpu_ranks import Check, arguments
from overweave import moe
from overweave.ir.shards import shard_rows
from overweave.schedules.records.experts import PLANS, SEQUENTIAL

Skew = Literal["uniform", "zipf", "one", "none", "random"]
STEP = 8  # elements: kernels read rows that begin where words of 16 bytes do


class MoeCase(NamedTuple):
    """One layer. tokens: of all ranks. inner: of all ranks; a multiple of STEP for each."""

    tokens: int
    top: int
    experts: int
    hidden: int
    inner: int
    skew: Skew
    dtype: torch.dtype
    has_bias: bool
    weighs_input: bool
    seed: int

    def __str__(self) -> str:
        words = (
            f"{self.skew} {'bias ' * self.has_bias}{'weighed input ' * self.weighs_input}{self.dtype} seed={self.seed}"
        )
        return f"t={self.tokens} top={self.top} E={self.experts} {self.hidden}x{self.inner} {words}"


class MoeData(NamedTuple):
    """All ranks' tensors, in fp64: whole numbers."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    up: torch.Tensor
    up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor
    gradient: torch.Tensor


def cases(count: int, seed: int, ranks: int, dtypes: tuple[torch.dtype, ...]) -> Iterator[MoeCase]:
    """The same on every rank."""
    chance = random.Random(seed)
    for index in range(count):
        yield MoeCase(
            tokens=chance.choice((0, 1, ranks - 1, ranks, 2 * ranks + 1, 37)),
            top=chance.choice((1, 2, 3, 8)),
            experts=chance.choice((1, 2, ranks, ranks + 1, 16)),
            hidden=STEP * chance.randint(1, 4),
            inner=STEP * ranks * chance.randint(1, 3),
            skew=get_args(Skew)[index % 5],
            dtype=chance.choice(dtypes),
            has_bias=chance.random() < 0.3,
            weighs_input=chance.random() < 0.2,
            seed=chance.randrange(1 << 30),
        )


def routed(case: MoeCase, draw: torch.Generator) -> torch.Tensor:
    """Experts of all tokens; a few slots without one where tokens go anywhere."""
    shape = (case.tokens, case.top)
    if case.skew == "one":
        return torch.full(shape, case.seed % case.experts, dtype=torch.int32)
    if case.skew == "none":
        return torch.full(shape, -1, dtype=torch.int32)
    low = -1 if case.skew == "random" else 0
    if case.skew == "zipf" and case.tokens:
        shares = 1.0 / torch.arange(1, case.experts + 1).double()
        return torch.multinomial(shares.expand(case.tokens, -1), case.top, True, generator=draw).int()
    return torch.randint(low, case.experts, shape, generator=draw, dtype=torch.int32)


def data_of(case: MoeCase) -> MoeData:
    """Whole numbers, drawn alike on every rank."""
    draw = torch.Generator().manual_seed(case.seed)

    def whole(*shape: int, low: int = -1, high: int = 2) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw).double()

    t, top, e, h, i = case.tokens, case.top, case.experts, case.hidden, case.inner
    sparse = (whole(e, h, i, low=0, high=8) == 0).double()  # else sums of two matmuls leave what bf16 can say
    return MoeData(
        x=whole(t, h) * whole(t, h, low=0),
        ids=routed(case, draw),
        weights=whole(t, top, low=0),
        up=whole(e, i, h) * whole(e, i, h, low=0),
        up_bias=whole(e, i),
        down=whole(e, h, i) * sparse,
        down_bias=whole(e, h),
        gradient=whole(t, h) * whole(t, h, low=0),
    )


class Expected(NamedTuple):
    """What a loop over pairs finds. h: by expert, in the order of pairs; y, and the gradients of the layer's inputs."""

    h: torch.Tensor
    y: torch.Tensor
    gradients: dict[str, torch.Tensor]


DIFFERENTIATED = ("x", "weights", "up", "down", "up_bias", "down_bias")


def loop_over_pairs(case: MoeCase, given: MoeData) -> Expected:
    """The layer in plain torch, pair by pair, in fp64."""
    leaves = {name: getattr(given, name).clone().requires_grad_() for name in DIFFERENTIATED}
    hs: list[list[torch.Tensor]] = [[] for _ in range(case.experts)]
    ys = [torch.zeros(case.hidden, dtype=torch.float64) for _ in range(case.tokens)]
    for token in range(case.tokens):
        for slot in range(case.top):
            expert = int(given.ids[token, slot])
            if not 0 <= expert < case.experts:
                continue
            weight = leaves["weights"][token, slot]
            x = leaves["x"][token] * (weight if case.weighs_input else 1.0)
            h = leaves["up"][expert] @ x + (leaves["up_bias"][expert] if case.has_bias else 0.0)
            z = leaves["down"][expert] @ h + (leaves["down_bias"][expert] if case.has_bias else 0.0)
            hs[expert].append(h)
            ys[token] = ys[token] + z * (1.0 if case.weighs_input else weight)
    flat = [h for of_expert in hs for h in of_expert]
    y = torch.stack(ys) if ys else torch.zeros(0, case.hidden, dtype=torch.float64)
    (y * given.gradient).sum().backward() if y.requires_grad else None
    gradients = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    h = torch.stack(flat).detach() if flat else torch.zeros(0, case.inner, dtype=torch.float64)
    return Expected(h, y.detach(), gradients)


class Mine:
    """What one rank has of a case, and what it finds wrong."""

    def __init__(self, case: MoeCase, device: str) -> None:
        self.case, self.device, self.data = case, device, data_of(case)
        self.exact = loop_over_pairs(case, self.data)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.rows = slice(*shard_rows(case.tokens, self.ranks, self.rank))
        self.inner = slice(*(each * case.inner // self.ranks for each in (self.rank, self.rank + 1)))
        self.own_experts = slice(*shard_rows(case.experts, self.ranks, self.rank))
        self.wrong: list[str] = []

    def tensor(self, whole: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A leaf on the device."""
        return whole.to(dtype or self.case.dtype).to(self.device).contiguous().requires_grad_()

    def compare(self, name: str, found: torch.Tensor | None, wanted: torch.Tensor) -> None:
        """Bit by bit; of gradients None is zero."""
        found = torch.zeros_like(wanted) if found is None else found.detach()
        wanted = wanted.to(found.dtype).to(found.device)
        if found.shape != wanted.shape or not torch.equal(found, wanted):
            self.wrong.append(name)

    def told(self, part: str) -> str:
        return f"{part} of {self.case}: {', '.join(self.wrong)} not bit-equal" if self.wrong else ""


def tensor_parallel(case: MoeCase, device: str, plan: str | None = None) -> str:
    """Rows gathered, sums scattered; every gradient."""
    mine = Mine(case, device)
    first_plan = None if case.weighs_input else plan  # which no overlapped plan does
    data, exact = mine.data, mine.exact
    x, ids = mine.tensor(data.x[mine.rows]), data.ids[mine.rows].to(device)
    weights = mine.tensor(data.weights[mine.rows], torch.float32)
    up, down = mine.tensor(data.up[:, mine.inner]), mine.tensor(data.down[:, :, mine.inner])
    up_bias, down_bias = mine.tensor(data.up_bias[:, mine.inner]), mine.tensor(data.down_bias)
    biases = (up_bias, down_bias) if case.has_bias else (None, None)
    on_input, on_output = (weights, None) if case.weighs_input else (None, weights)
    h, routed = moe.all_gather_experts(
        x, ids, up, bias=biases[0], topk_weights=on_input, m=case.tokens, plan=first_plan
    )
    mine.compare("h", h[: len(exact.h)], exact.h[:, mine.inner])
    y = moe.experts_reduce_scatter(h, routed, on_output, down, bias=biases[1], plan=plan)
    mine.compare("y", y, exact.y[mine.rows])
    again = moe.experts_reduce_scatter(
        h.detach(), ids, on_output, down.detach(), bias=biases[1], m=case.tokens, plan=plan
    )
    mine.compare("y of ids", again, exact.y[mine.rows])
    y.backward(data.gradient[mine.rows].to(case.dtype).to(device))
    mine.compare("dx", x.grad, exact.gradients["x"][mine.rows])
    mine.compare("dweights", weights.grad, exact.gradients["weights"][mine.rows])
    mine.compare("dup", up.grad, exact.gradients["up"][:, mine.inner])
    mine.compare("ddown", down.grad, exact.gradients["down"][:, :, mine.inner])
    if case.has_bias:
        mine.compare("dup_bias", up_bias.grad, exact.gradients["up_bias"][:, mine.inner])
        mine.compare("ddown_bias", down_bias.grad, exact.gradients["down_bias"])
    return mine.told("tensor parallel")


def chained(case: MoeCase, device: str, plan: str | None = None) -> str:
    """A whole layer at once, on tokens' weights on its output."""
    case = case._replace(weighs_input=False)
    mine = Mine(case, device)
    data, exact = mine.data, mine.exact
    wide = [data.x[mine.rows], data.up[:, mine.inner], data.down[:, :, mine.inner]]
    x, up, down = (each.to(case.dtype).to(device).contiguous() for each in wide)
    biases = [each.to(case.dtype).to(device).contiguous() for each in (data.up_bias[:, mine.inner], data.down_bias)]
    weights = moe.ExpertWeights(up, down, *(biases if case.has_bias else (None, None)))
    ids, of_slots = data.ids[mine.rows].to(device), data.weights[mine.rows].float().to(device)
    mine.compare("y", moe.experts_mlp(x, ids, of_slots, weights, m=case.tokens, plan=plan), exact.y[mine.rows])
    return mine.told("layer")


def held(case: MoeCase, device: str, plan: str | None = None) -> str:
    """A layer whose experts ranks hold whole, without a look at counts."""
    case = case._replace(weighs_input=False)
    mine = Mine(case, device)
    data, exact, own = mine.data, mine.exact, mine.own_experts
    wide = [each[own] for each in (data.up, data.down, data.up_bias, data.down_bias)]
    up, down, up_bias, down_bias = map(mine.tensor, wide)
    given = (up_bias, down_bias) if case.has_bias else (None, None)
    weights = moe.ExpertWeights(up, down, given[0], given[1], first=own.start)
    x, ids = mine.tensor(data.x[mine.rows]), data.ids[mine.rows].to(device)
    of_slots = mine.tensor(data.weights[mine.rows], torch.float32)
    with torch.set_grad_enabled(plan is None):
        y = moe.experts_mlp(x, ids, of_slots, weights, m=case.tokens, plan=plan)
    mine.compare("y", y, exact.y[mine.rows])
    if plan is None:
        y.backward(data.gradient[mine.rows].to(case.dtype).to(device))
        mine.compare("dx", x.grad, exact.gradients["x"][mine.rows])
        mine.compare("dweights", of_slots.grad, exact.gradients["weights"][mine.rows])
        mine.compare("dup", up.grad, exact.gradients["up"][own])
        mine.compare("ddown", down.grad, exact.gradients["down"][own])
    return mine.told("whole experts")


def all_reduced(case: MoeCase, device: str, plan: str | None = None) -> str:
    """Tokens that every rank has."""
    mine = Mine(case, device)
    data, exact = mine.data, mine.exact
    x, ids, weights = mine.tensor(data.x), data.ids.to(device), mine.tensor(data.weights, torch.float32)
    up, down = mine.tensor(data.up[:, mine.inner]), mine.tensor(data.down[:, :, mine.inner])
    biases = [mine.tensor(each) for each in (data.up_bias[:, mine.inner], data.down_bias)]
    up_bias, down_bias = biases if case.has_bias else (None, None)
    on_input, on_output = (weights, None) if case.weighs_input else (None, weights)
    h, routed = moe.experts_matmul(x, ids, up, bias=up_bias, topk_weights=on_input)
    y = moe.experts_all_reduce(h, routed, on_output, down, bias=down_bias, plan=plan)
    mine.compare("y", y, exact.y)
    y.backward(data.gradient.to(case.dtype).to(device))
    mine.compare("dup", up.grad, exact.gradients["up"][:, mine.inner])
    mine.compare("ddown", down.grad, exact.gradients["down"][:, :, mine.inner])
    if not case.weighs_input:
        mine.compare("dweights", weights.grad, exact.gradients["weights"])
    if down_bias is not None:
        mine.compare("ddown_bias", down_bias.grad, exact.gradients["down_bias"])
    return mine.told("all-reduce")


def expert_parallel(case: MoeCase, device: str, is_pushed: bool = False) -> str:
    """Tokens sent to the ranks of their experts, and back; with a bound, and, by the library, without."""
    mine = Mine(case, device)
    data, exact = mine.data, mine.exact
    plan = moe.Push(tokens=-(-case.tokens // mine.ranks)) if is_pushed else None
    for most in (case.tokens + 3,) if is_pushed else (None, case.tokens + 3):
        x, ids = mine.tensor(data.x[mine.rows]), data.ids[mine.rows].to(device)
        weights = mine.tensor(data.weights[mine.rows], torch.float32)
        sent = moe.dispatch(x, ids, weights, case.experts, most=most, plan=plan)
        if most is not None and len(sent.x) != most:
            mine.wrong.append("rows of the bound")
        up, down = mine.tensor(data.up[mine.own_experts]), mine.tensor(data.down[mine.own_experts])
        biases = [mine.tensor(each[mine.own_experts]) for each in (data.up_bias, data.down_bias)]
        up_bias, down_bias = biases if case.has_bias else (None, None)
        on_input, on_output = (sent.topk_weights, None) if case.weighs_input else (None, sent.topk_weights)
        if len(up):
            h, routed = moe.experts_matmul(sent.x, sent.topk_ids, up, bias=up_bias, topk_weights=on_input)
            parts = moe.experts_sum(h, routed, on_output, down, bias=down_bias)
        else:  # a rank without experts receives nothing
            parts = sent.x * 0
        y = moe.combine(parts, sent)
        mine.compare(f"y, most {most}", y, exact.y[mine.rows])
        y.backward(data.gradient[mine.rows].to(case.dtype).to(device))
        mine.compare(f"dx, most {most}", x.grad, exact.gradients["x"][mine.rows])
        mine.compare(f"dweights, most {most}", weights.grad, exact.gradients["weights"][mine.rows])
        if len(up):
            mine.compare(f"dup, most {most}", up.grad, exact.gradients["up"][mine.own_experts])
            mine.compare(f"ddown, most {most}", down.grad, exact.gradients["down"][mine.own_experts])
    return mine.told("expert parallel")


OVERLAPPED = [plan for plan in PLANS if plan != SEQUENTIAL]
# Part -> its check; those that take a plan, with each of them.
PARTS: dict[str, Callable[[MoeCase, str], str]] = {
    **{
        f"{name}{f', {plan}' if plan else ''}": partial(part, plan=plan)
        for name, part in (
            ("tensor parallel", tensor_parallel),
            ("layer", chained),
            ("whole experts", held),
            ("all-reduce", all_reduced),
        )
        for plan in (None, *OVERLAPPED)
    },
    "expert parallel": expert_parallel,
    "expert parallel, push": partial(expert_parallel, is_pushed=True),
}


Part = Callable[[MoeCase, str], str]


def outcome(part: Part, device: str, case: MoeCase) -> str:
    """What is wrong with a case on this rank; empty if nothing is."""
    with kernels_on_cpu() if device == "cpu" and is_asked_for() else nullcontext():
        return part(case, device)


def tried(part: str, count: int, seed: int) -> list[str]:
    """One rank's part, on the CPU."""
    drawn = cases(count, seed, dist.get_world_size(), (torch.float32,))
    return [wrong for case in drawn if (wrong := outcome(PARTS[part], "cpu", case))]


def checks(asked: argparse.Namespace, device: str) -> Iterable[Check]:
    """A line for each part."""
    ranks, dtype = dist.get_world_size(), torch.bfloat16 if device == "cuda" else torch.float32
    for name, part in PARTS.items():
        drawn = cases(asked.cases, asked.seed + ranks, ranks, (dtype,))
        yield Check(name, partial(map, partial(outcome, part, device), drawn))


def main() -> int:
    parser = arguments(str(__doc__), deadline_s=60.0)
    parser.add_argument("--cases", type=int, default=60, help="random layers, in each world")
    return run_on_any_ranks(parser, checks)


if __name__ == "__main__":
    sys.exit(main())
