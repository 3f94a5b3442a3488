"""Which plan a call on GPUs gets if it names none: the one that is predicted to be quicker than the library's, by the
margin of what nobody measured."""

from __future__ import annotations

from functools import lru_cache

import torch

from overweave.attention.cases import AttentionCase
from overweave.attention.predicted import predicted
from overweave.hardware.machine import Machine
from overweave.ops.call.groups import group_of
from overweave.ops.dispatch.route import GroupRank
from overweave.schedules.records.attention import SEQUENTIAL
from overweave.tuner.space.target import target_of

AttentionSizes = tuple[int, int, int, int, int]  # batch, heads of q, of k, tokens of all ranks, columns of a head
MOST_CHOICES = 256  # that are kept


def quickest(
    place: GroupRank, device: torch.device, sizes: AttentionSizes, mask: tuple[bool, str, int | None, bool]
) -> str:
    """The plan, alike on all ranks. mask: is_causal, sequence, window, and whether gradients will be asked for. On a
    CPU, and on GPUs that nobody described, the library's. Collective the first time."""
    if device.type != "cuda" or place.world_size == 1 or not sizes[3]:
        return SEQUENTIAL
    return _on_gpus(place.name, place.world_size, device.index, sizes, mask)


def _on_gpus(name: str, ranks: int, index: int, sizes: AttentionSizes, mask: tuple[bool, str, int | None, bool]) -> str:
    group = group_of(name)
    with group.lock:
        machine = target_of(torch.device("cuda", index), group).machine(ranks)
    return SEQUENTIAL if machine is None else _predicted(sizes, mask, ranks, machine)


_on_gpus._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as ops/dispatch/route.group_rank_of


@lru_cache(maxsize=MOST_CHOICES)
def _predicted(sizes: AttentionSizes, mask: tuple[bool, str, int | None, bool], ranks: int, machine: Machine) -> str:
    (batch, heads, groups, tokens, head_dim), (is_causal, layout, window, is_trained) = sizes, mask
    options = {"batch": batch, "is_causal": is_causal, "layout": layout, "window": window, "is_trained": is_trained}
    return predicted(AttentionCase("", tokens, heads, head_dim, groups, **options), ranks, machine).choice  # type: ignore[arg-type]
