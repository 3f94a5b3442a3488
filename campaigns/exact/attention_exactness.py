"""Is attention right that ranks split? Every plan against fp64, beside torch's own attention of the whole sequence.

    python -m campaigns.attention_exactness --worlds 2 3 4 8 --cases 40
    torchrun --standalone --nproc-per-node 2 -m campaigns.attention_exactness --cases 40    (on GPUs, in bf16)

Random sequences: contiguous and zigzag, causal and not, grouped heads, windows, documents, lengths that ranks do not
divide, ranks without rows. Each call runs twice, a random rank late in the second: the same bits, and the same as every
other plan's but `heads`. Errors are added over all cases of a plan: those of results, and of the gradients of q, k and
v, are at most 1.05 times torch's, on a CPU; on a GPU, whose kernels round each piece, 1.25 times.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from campaigns.gpu_ranks import Check, arguments, run_campaign
from overweave.attention import context_parallel_attention, plain
from overweave.attention.plain import Seen
from overweave.attention.sequence import CONTIGUOUS, ZIGZAG, Sequence
from overweave.runtime.host.processes import run_ranks
from overweave.schedules.records.attention import DOUBLE_RING, HEADS, PLANS, SEQUENTIAL

WORLDS = (2, 3, 4, 8)
MOST_OFF, MOST_OFF_ON_GPUS, LATE_S = 1.05, 1.25, 0.02
FOUND = ("out", "dq", "dk", "dv")


class AttentionCase(NamedTuple):
    """One call. documents: where they begin, and where the last ends; none: one sequence, a batch of them."""

    batch: int
    heads: int
    groups: int
    columns: int
    sequence: Sequence
    documents: tuple[int, ...]
    dtype: torch.dtype
    seed: int

    @property
    def seen(self) -> Seen:
        """The mask of the whole sequence."""
        offsets = torch.tensor(self.documents, dtype=torch.int32)
        left = None if self.sequence.window is None else self.sequence.window - 1
        documents = (offsets, offsets) if self.documents else None
        return Seen(self.columns**-0.5, self.sequence.is_causal, left, documents)


def cases(count: int, seed: int, ranks: int, plan: str, dtypes: tuple[torch.dtype, ...]) -> Iterator[AttentionCase]:
    """The same on every rank; what the plan can run."""
    chance = random.Random(seed)
    for _ in range(count):
        is_causal, is_zigzag, has_documents = (chance.random() < share for share in (0.7, 0.4, 0.3))
        rows = chance.choice((1, ranks - 1, 2 * ranks + 1, 37, 16 * ranks, 24 * ranks))
        rows = 2 * ranks * -(-rows // (2 * ranks)) if is_zigzag else max(rows, 1)
        is_windowed = is_causal and chance.random() < 0.3 and (plan == HEADS or not (is_zigzag or has_documents))
        window = chance.randint(1, rows) if is_windowed else None
        groups = chance.choice((1, 2)) * (ranks if plan == HEADS else 1)
        inner = sorted(chance.randint(0, rows) for _ in range(chance.randint(1, 4)))
        yield AttentionCase(
            batch=1 if has_documents else chance.randint(1, 2),
            heads=groups * chance.choice((1, 2, 3)),
            groups=groups,
            columns=chance.choice((8, 32, 64)),
            sequence=Sequence(rows, ranks, is_causal, is_zigzag, window),
            documents=tuple(inner) if has_documents else (),
            dtype=chance.choice(dtypes),
            seed=chance.randrange(1 << 30),
        )


def whole(case: AttentionCase, device: str) -> list[torch.Tensor]:
    """All ranks' q, k, v and gradient of the result, drawn alike on every rank."""
    draw = torch.Generator().manual_seed(case.seed)
    heads = (case.heads, case.groups, case.groups, case.heads)
    shapes = [(case.batch, each, case.sequence.rows, case.columns) for each in heads]
    return [torch.randn(*shape, generator=draw).to(case.dtype).to(device) for shape in shapes]


def exact_of(case: AttentionCase, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """In fp64: the result, the gradients of q, k and v, and the log-sum-exp."""
    *leaves, gradient = [each.double() for each in given]
    q, k, v = (each.requires_grad_() for each in leaves)
    out, lse = plain.attend(q, k, v, case.seen)
    out.backward(gradient)
    return [out.detach(), *(each.grad for each in leaves), lse.detach()]  # type: ignore[list-item]


def by_torch(case: AttentionCase, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same in the case's dtype by torch; rows that see nothing are zero there, too."""
    *leaves, gradient = [each.clone() for each in given]
    q, k, v = (each.requires_grad_() for each in leaves)
    mask, is_plain = None, case.sequence.window is None and not case.documents
    if not is_plain:
        seen = case.seen
        seen = seen._replace(offsets=seen.offsets and tuple(each.to(q.device) for each in seen.offsets))  # type: ignore[arg-type]
        mask = plain.is_seen((case.sequence.rows, case.sequence.rows), seen, q.device)
    options = {"is_causal": case.sequence.is_causal and is_plain, "enable_gqa": True, "scale": case.seen.scale}
    out = functional.scaled_dot_product_attention(q, k, v, mask, **options)  # type: ignore[arg-type]
    if mask is not None:
        out = torch.where(mask.any(1)[:, None], out, 0.0)
    out.backward(gradient)
    return [out.detach(), *(each.grad.nan_to_num(0.0) for each in leaves)]  # type: ignore[union-attr]


def own_rows(case: AttentionCase, x: torch.Tensor) -> torch.Tensor:
    """Of this rank."""
    rank = dist.get_rank()
    places = case.sequence.places(rank, slice(0, case.sequence.own(rank)))
    return torch.cat([x[:, :, low:high] for low, high in places], 2) if places else x[:, :, :0]


def by_ranks(case: AttentionCase, plan: str, given: list[torch.Tensor], is_backward: bool = True) -> list[torch.Tensor]:
    """This rank's rows of the result, the gradients of q, k and v, and the log-sum-exp. given: this rank's rows."""
    *leaves, gradient = given
    leaves = [each.detach().requires_grad_(is_backward) for each in leaves]
    q, k, v = leaves
    offsets = torch.tensor(case.documents, dtype=torch.int32, device=q.device) if case.documents else None
    if offsets is not None:
        q, k, v = (each.squeeze(0).transpose(0, 1) for each in (q, k, v))
    mask = {"is_causal": case.sequence.is_causal, "window": case.sequence.window, "cu_seqlens": offsets}
    layout = {"sequence": ZIGZAG if case.sequence.is_zigzag else CONTIGUOUS, "tokens": case.sequence.rows}
    options: dict[str, Any] = mask | layout | {"enable_gqa": True, "plan": plan, "return_lse": True}
    out, lse = context_parallel_attention(q, k, v, **options)
    if offsets is not None:
        out, lse = out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
    of_leaves = torch.autograd.grad(out, leaves, gradient) if is_backward else ()
    return [out.detach(), *of_leaves, lse]


class Off(NamedTuple):
    """Squares of errors of this rank's rows, ours and torch's; and what is wrong."""

    ours: list[float]
    torchs: list[float]
    wrong: str


def measured(plan: str, device: str, case: AttentionCase) -> Off:
    """One case on this rank."""
    given, chance = whole(case, device), random.Random(case.seed)
    wanted, theirs = [exact_of(case, [each.cpu() for each in given]), by_torch(case, given)]
    own = [own_rows(case, each).contiguous() for each in given]
    found, late = by_ranks(case, plan, own), chance.randrange(dist.get_world_size())
    if dist.get_rank() == late:
        time.sleep(LATE_S)
    wrong = _wrong(case, found, own_rows(case, wanted[-1]))
    again = by_ranks(case, plan, own)
    compared = len(found) if device == "cpu" else 1  # flash and cuDNN add gradients of q in any order
    pairs = list(zip((*FOUND, "lse"), found, again, strict=True))[:compared]
    wrong += [f"{name} has other bits" for name, one, other in pairs if not torch.equal(one, other)]
    if plan not in (SEQUENTIAL, DOUBLE_RING, HEADS) and not torch.equal(found[0], by_ranks(case, SEQUENTIAL, own)[0]):
        wrong.append("other bits than sequential")
    ours, torchs = (
        [
            float((own_rows(case, exactly) - each.cpu().double()).square().sum())
            for each, exactly in zip(rows, wanted, strict=False)
        ]
        for rows in (found[:4], [own_rows(case, each) for each in theirs])
    )
    return Off(ours, torchs, f"{plan} of {case}: {', '.join(wrong)}" if wrong else "")


def _wrong(case: AttentionCase, found: list[torch.Tensor], lse: torch.Tensor) -> list[str]:
    """NaN, and log-sum-exps that are far off or not minus infinity where nothing is seen."""
    wrong = [f"NaN in {name}" for name, each in zip((*FOUND, "lse"), found, strict=True) if bool(each.isnan().any())]
    near = 1e-5 if case.dtype in (torch.float32, torch.float64) else 1e-2
    if not torch.allclose(found[-1].double().cpu(), lse, atol=near, rtol=near):
        wrong.append("log-sum-exp")
    return wrong


def tried(plan: str, count: int, seed: int, dtype: str) -> tuple[list[list[float]], list[str]]:
    """One rank's part, on the CPU: errors by what is found, ours and torch's, over all cases; and what is wrong."""
    drawn = cases(count, seed, dist.get_world_size(), plan, (getattr(torch, dtype),))
    offs = [measured(plan, "cpu", case) for case in drawn]
    sums = [[sum(each) for each in zip(*(off[kind] for off in offs), strict=True)] for kind in (0, 1)]
    return sums, [off.wrong for off in offs if off.wrong]


def ratios(sums: Iterable[list[list[float]]]) -> dict[str, float]:
    """How far we are off fp64 in units of torch: the root of the mean square, over ranks."""
    ours, torchs = ([sum(each) for each in zip(*of_ranks, strict=True)] for of_ranks in zip(*sums, strict=True))
    return {name: (mine / max(theirs, 1e-30)) ** 0.5 for name, mine, theirs in zip(FOUND, ours, torchs, strict=True)}


def on_gpus(asked: argparse.Namespace) -> Iterable[Check]:
    """Of ranks that torchrun started."""

    def outcomes(plan: str) -> Iterator[str]:
        sums: list[torch.Tensor] = []
        for case in cases(asked.cases, asked.seed, dist.get_world_size(), plan, (torch.bfloat16,)):
            off = measured(plan, "cuda", case)
            sums.append(torch.tensor([off.ours, off.torchs], dtype=torch.float64, device="cuda"))
            yield off.wrong
        total = torch.stack(sums).sum(0)
        dist.all_reduce(total)
        found = ratios([total.tolist()])
        yield f"{plan} is off by {found}" if max(found.values()) > MOST_OFF_ON_GPUS else ""

    for plan in PLANS:
        yield Check(f"exact: {plan}", partial(outcomes, plan))


def main() -> int:
    parser = arguments(str(__doc__), deadline_s=60.0)
    parser.add_argument("--worlds", type=int, nargs="*", default=WORLDS)
    parser.add_argument("--cases", type=int, default=40, help="random sequences, for each plan in each world")
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--seed", type=int, default=0)
    if "LOCAL_RANK" in os.environ:
        run_campaign(parser, on_gpus)
    asked, failed = parser.parse_args(), 0
    for ranks, plan, dtype in ((r, p, d) for r in asked.worlds for p in PLANS for d in asked.dtypes):
        given = plan, asked.cases, asked.seed + ranks, dtype
        told = run_ranks(tried, ranks, *given, timeout_s=3600, group_timeout_s=120)
        found = ratios(sums for sums, _ in told)
        wrong = [line for _, lines in told for line in lines]
        wrong += [f"{name} is off {ratio:.3f} times torch" for name, ratio in found.items() if ratio > MOST_OFF]
        failed += len(wrong)
        off = " ".join(f"{name} {ratio:.3f}" for name, ratio in found.items())
        verdict = "; ".join(wrong[:5]) or "all right"
        print(f"W={ranks} {plan:10s} {dtype} x {asked.cases}: {verdict}; errors by torch's: {off}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
