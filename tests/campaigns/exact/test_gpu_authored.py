"""What the campaign of compiled kernels calls on GPUs is planned and proven here, and every back end is in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from campaigns.exact import authored_runs
from campaigns.exact.gpu_authored import Trial, ordinary, particular
from campaigns.gpu_ranks import spread_over
from campaigns.lint.authored_cases import AUTHORS, KERNELS
from overweave.ops.author.compile import FusedKernel, bind_arguments, compile
from overweave.schedules.moves.moves import MOVERS, Collective, Sum
from overweave.schedules.weave.transports import legal, transport_of, transports


class Planned:
    """In the place of a fused kernel: proves the plan of every rank, and moves nothing."""

    def __init__(self, fused: FusedKernel, world_size: int) -> None:
        self.fused, self.world_size, self.calls = fused, world_size, 0

    def __call__(self, *arguments: Any, **named: Any) -> None:
        given, _ = bind_arguments(self.fused.kernel, arguments, named)
        numbers = {name: value for name, value in given.items() if type(value) is int}
        self.fused.plan(numbers, self.world_size)
        self.calls += 1


@pytest.fixture(params=[2, 4])
def world_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of ranks that are not there: this is the last one, and its data is on the CPU."""
    ranks: int = request.param
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "get_rank", lambda: ranks - 1)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(authored_runs, "scale", lambda: authored_runs.LARGE)
    zeros = {"integers": lambda *shape, seed: torch.zeros(shape).bfloat16(), "empty": lambda *shape: torch.zeros(shape)}
    for name, made in zeros.items():
        monkeypatch.setattr(authored_runs, name, made)
    return ranks


def fused_of(trial: Trial) -> FusedKernel:
    return compile(f"{KERNELS / trial.name}.py:{AUTHORS[trial.name].name}", trial.schedule)


@pytest.mark.slow
def test_what_each_list_by_hand_shows_is_planned_and_proven(world_size: int):
    for trial in particular(world_size):
        planned = Planned(fused_of(trial), world_size)
        trial.run(planned, 1)  # type: ignore[arg-type]
        assert planned.calls == 1, trial.words


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [4], indirect=True)
@pytest.mark.parametrize("count", [12, pytest.param(40, marks=pytest.mark.nightly)])
def test_others_are_planned_and_proven(world_size: int, count: int):
    for trial in spread_over(list(ordinary()), count):
        planned = Planned(fused_of(trial), world_size)
        trial.run(planned, 1)  # type: ignore[arg-type]
        assert planned.calls == 1, trial.words


def carried(trials: Iterator[Trial]) -> dict[tuple[str, str], set[str]]:
    """By kernel and side, who carries something in some trial."""
    found: dict[tuple[str, str], set[str]] = {}
    for trial in trials:
        for words in trial.schedule.values():
            transport = transport_of(words)
            movers = found.setdefault((trial.name, transport.side), set())
            if isinstance(words, str):
                mover = words.partition("mover=")[2].split()
                movers.add("library" if not transport.is_woven else mover[0] if mover else "copy_engine")
            else:
                moved = (one for one in words.moves if not isinstance(one, Sum))
                movers |= {"library" if isinstance(one, Collective) else one.mover for one in moved}
    return found


def test_every_kernel_runs_by_every_back_end(world_size: int):
    found = carried(iter([*particular(world_size), *ordinary()]))
    read = {*MOVERS, "library"}
    stored = {*legal("reduce_scatter.scatter"), "library"}
    by_descriptor = stored - {"tiles"}  # no pointer leads to a peer
    wanted = {(name, "gather"): read for name in AUTHORS if name != "norm"}
    wanted |= {("matmul", "scatter"): stored, ("persistent", "scatter"): by_descriptor}
    wanted |= {(name, "spread"): stored for name in ("norm", "layer_norm", "matmul")}
    assert {key: movers - found.get(key, set()) for key, movers in wanted.items()} == {key: set() for key in wanted}


def test_every_schedule_of_a_name_is_in_a_trial(world_size: int):
    words = [str(one) for trial in ordinary() for one in trial.schedule.values()]
    tried = {each.split()[0] for each in words}
    # Of the first two their reduce-scatters and all-gathers are; the others are for links without a switch.
    others = {"all_reduce.double_ring", "all_reduce.islands", "all_gather.synth", "reduce_scatter.synth"}
    assert set(transports()) - tried == others
