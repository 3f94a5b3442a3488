"""Attention that GPUs split: exact, on time, in graphs, with late ranks and absent ones; and how long it takes.

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_attention [--cases 20] [--calls 12] [--late 0.1]
    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_attention --times [--tokens 8192 16384] [--only Attn-1]
    python -m campaigns.gpu_attention --alone [--ranks 2]

exact: random sequences in bf16 by every plan, against fp64, beside torch's attention. calls: one larger sequence again
and again with fresh data, one rank late; then captured in one graph and replayed; backwards, too. absent: one rank
leaves out calls, and its peers say so in time. --times, --alone: see campaigns/rates/attention_times.py.
Ranks that share a GPU have gloo as their library, whose calls no graph holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from campaigns.exact import attention_exactness
from campaigns.exact.attention_exactness import AttentionCase, by_ranks, exact_of, own_rows, whole
from campaigns.exact.trials import LATE_S, Tensors, Trial, absent_rank, long_run
from campaigns.gpu_ranks import Check, arguments, join, leave, run_campaign, sharers
from campaigns.rates import attention_times
from overweave.attention.sequence import Sequence
from overweave.schedules.records.attention import PLANS

DEADLINE_S, CYCLES = 8.0, 2e9  # cycles: a second of a GPU
TOKENS, NEAR, NEAR_GRADIENTS = 1024, 0.03, 0.15  # near: absolute, of results and gradients of about 1 in bf16


def trial(plan: str, is_backward: bool) -> Trial:
    """A causal zigzag sequence: its result, or the gradients of q, k and v one behind the other."""
    ranks = dist.get_world_size()
    tokens = 2 * ranks * -(-TOKENS // (2 * ranks))
    sequence = Sequence(tokens, ranks, is_causal=True, is_zigzag=True)
    case = AttentionCase(1, 4 * ranks, 2 * ranks, 64, sequence, (), torch.bfloat16, 0)

    def inputs(seed: int) -> Tensors:
        return tuple(own_rows(case, each).contiguous() for each in whole(case._replace(seed=seed), "cuda"))

    def run(given: Tensors) -> torch.Tensor:
        found = by_ranks(case, plan, [*given], is_backward)
        return torch.cat([each.flatten() for each in (found[1:4] if is_backward else found[:1])])

    def exact(seed: int, given: Tensors) -> torch.Tensor:
        found = exact_of(case, whole(case._replace(seed=seed), "cuda"))
        return torch.cat([own_rows(case, each).flatten() for each in (found[1:4] if is_backward else found[:1])])

    name = f"attention{', backward' * is_backward}, {plan}"
    return Trial(name, inputs, run, exact, NEAR_GRADIENTS if is_backward else NEAR)


def checks(asked: argparse.Namespace) -> Iterator[Check]:
    yield from attention_exactness.on_gpus(asked)
    late = int(asked.late * CYCLES)
    for plan in PLANS:
        for each in (trial(plan, is_backward=False), trial(plan, is_backward=True)):
            yield Check(f"calls: {each.name}", partial(long_run, each, asked.calls, False, late), asked.calls)
            if sharers() == 1 or plan in ("per_shard", "ring"):
                yield Check(f"replayed: {each.name}", partial(long_run, each, asked.replays, True, late), asked.replays)
    for plan in ("per_shard", "ring"):
        each = trial(plan, is_backward=False)
        yield Check(f"absent: {each.name}", partial(absent_rank, each, asked.deadline + LATE_S + 3), 1)


def main() -> None:
    parser = arguments(__doc__ or "", deadline_s=DEADLINE_S)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--calls", type=int, default=12)
    parser.add_argument("--replays", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--late", type=float, default=0.1, help="seconds")
    parser.add_argument("--times", action="store_true", help="times beside NCCL with SDPA and torch's context_parallel")
    parser.add_argument("--alone", action="store_true", help="times of pieces on one GPU, where nothing travels")
    parser.add_argument("--ranks", type=int, default=2, help="of --alone")
    parser.add_argument("--tokens", type=int, nargs="*", default=attention_times.TOKENS)
    asked = parser.parse_args()
    if asked.alone:
        attention_times.print_alone(asked)
    elif asked.times:
        attention_times.print_beside(asked, partial(join, attention_times.DEADLINE), leave)
    else:
        run_campaign(parser, checks)


if __name__ == "__main__":
    main()
