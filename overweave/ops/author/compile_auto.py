"""Compiled kernels whose schedule is chosen: predicted for each set of numbers, or measured once by `tune`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

import torch

from overweave.compiler.emit.fuse import kernel_of
from overweave.compiler.frontend.soundness import check_exchanged
from overweave.compiler.frontend.source.kernel import AnnotatedKernel
from overweave.errors import InputError, OverweaveError
from overweave.hardware.machine import Machine
from overweave.ir.dtype import Dtype, MovedDtype
from overweave.memory.group import Group
from overweave.ops.author.arguments import (
    LAUNCH_OPTIONS,
    MOVED,
    check_asked,
    check_on_paper,
    check_options,
    numbers_of,
    where_of,
)
from overweave.ops.author.compile import OPTIONS, FusedKernel, by_name
from overweave.ops.call.devices import current
from overweave.ops.call.groups import GroupLike, group_of, refuse
from overweave.runtime.authored import tensor_of
from overweave.schedules.moves.moves import AllToAll, Gather, Reduction
from overweave.schedules.weave.author_plan import TILE_GROUP, author_plan, plan_dtype
from overweave.schedules.weave.transports import GATHER, ScheduleChoice, wanted_of
from overweave.sim.cost import estimate_tile_us
from overweave.sim.simulate import total_us
from overweave.tuner.measure.compiled import (
    FINALISTS,
    Constants,
    KernelWay,
    RankedWay,
    TimedWay,
    TunedTimes,
    close_choices,
    content_key,
    is_auto,
    predicted_best,
    prediction_machine,
    rank_ways,
    read_tuning,
    refinements,
    save_tuning,
    shortlist,
    side_of,
    with_side,
)
from overweave.tuner.measure.search import EFFORT, search
from overweave.tuner.measure.trial import TimedTrial
from overweave.tuner.model.choose import SOURCES, candidate_counts
from overweave.tuner.space.target import Target, target_of
from overweave.tuner.store.cache import fingerprint


def compile_auto(
    kernel: Any,
    schedule: ScheduleChoice | Mapping[str, ScheduleChoice],
    *,
    configs: Sequence[Mapping[str, int]] = (),
    tile_us: float | None = None,
) -> AutoFused:
    """As `compile`, with schedules that are chosen: `all_gather.auto` stands for every `all_gather.*` and its options.

    schedule: of each exchanged tensor, automatic, named, or a list of moves by hand, whose Puts with `mover="auto"` are
    left to every back end in turn; one alone means the first tensor that is read, or written.
    configs: constants to choose among too, of the kernel's tile, of its launch, and `tile_group`, which calls then
    leave out; by default those of its `@triton.autotune`. tile_us: what one tile takes, every SM busy, for the model;
    by default that is guessed from what a tile touches (sim/cost.py).

    Returns a callable as `compile` does, whose calls wait and raise as its. Each set of numbers is simulated once;
    its `tune` measures, collectively. On a CPU the model stands for an H200. Raises DirectiveError for a kernel that
    cannot be compiled, and InputError for schedules and configs that are none.
    SOURCE: AutoOverlap 5.3.
    """
    read = kernel_of(*where_of(kernel))
    named = schedule.values() if isinstance(schedule, Mapping) else (schedule,)
    if not all(isinstance(how, str | Gather | Reduction | AllToAll) for how in named):
        cure = "Pass names, such as all_gather.auto, or lists of moves"
        raise InputError("compile_auto", f"schedule {str(schedule)[:60]}", cure)
    if not isinstance(schedule, Mapping):
        loads, stores = ([one.directive.tensor for one in side] for side in (read.loads, read.stores))
        schedule = dict.fromkeys((loads if side_of(schedule) == GATHER else stores)[:1], schedule)
    if tile_us is not None and not (isinstance(tile_us, int | float) and 0 < tile_us < inf):
        raise InputError("compile_auto: tile_us", f"got {str(tile_us)[:40]!r}", "Pass microseconds above 0, or None")
    chosen = configs_of(kernel, configs)
    _check_constants(read, chosen)
    return AutoFused(read, schedule, chosen, tile_us)


class AutoFused:
    """A kernel whose schedules and constants are chosen anew for each set of numbers, by what was measured of it, else
    by the model. All ranks choose alike, or the call raises RankMismatch.
    """

    def __init__(
        self,
        kernel: AnnotatedKernel,
        asked: Mapping[str, ScheduleChoice],
        configs: tuple[Constants, ...],
        tile_us: float | None,
    ) -> None:
        """configs: what to choose constants from, at least one, which may be none at all."""
        self.kernel, self.configs, self._tile_us = kernel, configs, tile_us
        loads, stores = ([one.directive.tensor for one in side] for side in (kernel.loads, kernel.stores))
        self.asked = {
            tensor: with_side(how, tensor in loads) if isinstance(how, str) else how for tensor, how in asked.items()
        }
        check_asked(kernel.source.name, self.asked)
        wanted_of(loads, stores, {tensor: how for tensor, how in self.asked.items() if not is_auto(how)})
        for tensor, how in self.asked.items():
            known = loads if side_of(how) == GATHER else stores
            if tensor not in known:
                found = f"the kernel {'reads' if known is loads else 'writes'} {', '.join(known) or 'none'}"
                raise InputError(f"schedule {str(how)[:40]!r} for {tensor[:40]!r}", found, "Name one of its tensors")
        read = {tensor for tensor, how in self.asked.items() if side_of(how) == GATHER}
        check_exchanged(kernel, read, self.asked.keys() - read)
        self._fused: dict[tuple[tuple[str, str], ...], FusedKernel] = {}
        self._ways: dict[tuple[Any, ...], KernelWay] = {}

    def __call__(self, *arguments: Any, group: GroupLike = None, **named: Any) -> None:
        """Runs the chosen way on this rank; what the call does and raises else: see `FusedKernel`."""
        resolved = group_of(group)
        try:
            call = _Call(self, resolved, arguments, named)
            if call.signature not in self._ways:
                known = read_tuning(self.kernel.source.name, call.key, self.asked, self.configs)
                self._ways[call.signature] = known.times[0].way if known else predicted_best(call.judged())
        except OverweaveError as error:
            raise refuse(resolved, error) from None
        call.run(self._ways[call.signature])

    def tune(self, *arguments: Any, group: GroupLike = None, **named: Any) -> tuple[TimedWay, ...]:
        """Measures the best few by the model with these arguments, then what lies around the best of them, and keeps
        what came out. Collective; takes seconds.

        Returns the times, the quickest first; the first few were timed anew, side by side. Later calls with the same
        numbers take the first, in other processes too. On a CPU nothing is measured and nothing kept: times are those
        of the model.
        Raises InputError, also where no way runs, and RankMismatch.
        """
        resolved = group_of(group)
        try:
            call = _Call(self, resolved, arguments, named)
            judged = call.judged()
        except OverweaveError as error:
            raise refuse(resolved, error) from None
        if call.device.type != "cuda":
            first = predicted_best(judged)
            self._ways[call.signature] = first
            times = [TimedWay(each.candidate, each.predicted_us) for each in judged if each.predicted_us is not None]
            return tuple(sorted(times, key=lambda one: (one.way != first, one.us)))
        with current(call.device):
            measured = TunedTimes(call.key, call.autotuned(judged))
        self._ways[call.signature] = measured.times[0].way
        if resolved.rank == 0:
            save_tuning(self.kernel.source.name, measured)
        return measured.times

    def rank(
        self, numbers: Mapping[str, int], world_size: int, dtype: Dtype = "bfloat16", target: Target | None = None
    ) -> tuple[RankedWay, ...]:
        """What the model says of every way that it looked at, the quickest first; on paper. numbers: as `plan` takes
        them, without those of `configs`. Raises InputError for what is no call."""
        return _quickest_first(self._judged(numbers, world_size, dtype, target))

    def explain(
        self, numbers: Mapping[str, int], world_size: int, dtype: Dtype = "bfloat16", target: Target | None = None
    ) -> str:
        """What calls take before they are tuned, and beside it every way that the model looked at, with its time or
        why it cannot be; as text, on paper. Raises InputError for what is no call, and where no way can be."""
        judged = self._judged(numbers, world_size, dtype, target)
        if all(one.obstacle for one in judged):
            asked = f"explain {self.kernel.source.name} on {world_size} ranks"
            raise InputError(asked, f"none of {len(judged)} ways can be; {judged[0].obstacle}", "Mend this first")
        taken = predicted_best(judged)
        width = max(len(str(one.candidate)) for one in judged)
        told = _quickest_first(judged)
        lines = (f"  {'->' if one.candidate == taken else '  '} {one.line(width)}" for one in told)
        return "\n".join(
            [
                f"{taken} runs. The library's way runs unless another is predicted to be well ahead.",
                SOURCES["model"],
                f"Its directives were read and proven of every place; {self.fused(taken).checked}.",
                *candidate_counts(judged),
                *lines,
            ]
        )

    def _judged(
        self, numbers: Mapping[str, int], world_size: int, dtype: Dtype, target: Target | None
    ) -> tuple[RankedWay, ...]:
        check_on_paper(self.kernel.source, numbers, world_size, dtype)
        machine = prediction_machine(target or Target("cpu"), world_size)
        return rank_ways(self.asked, self.configs, self._prediction(numbers, world_size, dtype), machine)

    def _prediction(
        self, numbers: Mapping[str, int], world_size: int, dtype: Dtype | Mapping[str, MovedDtype]
    ) -> Callable[[KernelWay, Machine], float]:
        reckoned = dtype if isinstance(dtype, str) else plan_dtype(dtype.values())

        def predict(way: KernelWay, machine: Machine) -> float:
            space, fused = self.kernel.space({**numbers, **dict(way.constants)}), self.fused(way)
            group = dict(way.constants).get("tile_group", TILE_GROUP)
            plan = author_plan(space, fused.wanted, world_size, dtype, None, fused.chosen, group)
            return total_us(plan, machine, self._tile_us or estimate_tile_us(machine, space, reckoned))

        return predict

    def fused(self, way: KernelWay) -> FusedKernel:
        """The kernel with the schedules of a way."""
        if way.exchanges not in self._fused:
            wanted = {tensor: close_choices(self.asked[tensor], how) for tensor, how in way.exchanges}
            self._fused[way.exchanges] = FusedKernel(self.kernel, wanted)
        return self._fused[way.exchanges]


def _quickest_first(judged: tuple[RankedWay, ...]) -> tuple[RankedWay, ...]:
    return tuple(sorted(judged, key=lambda each: each.us))


class _Call:
    """One call: its arguments by name, and all that its choice depends on."""

    def __init__(self, auto: AutoFused, group: Group, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self._auto, self.group, self._arguments, self._named = auto, group, arguments, dict(named)
        given, options = by_name(auto.kernel, arguments, {**named, **dict(auto.configs[0])})
        twice = [name for name, _ in auto.configs[0] if name in named]
        if twice:
            asked = f"call {auto.kernel.source.name} with {', '.join(twice)}"
            raise InputError(asked, "it is chosen from configs", "Leave it out, or compile without configs")
        self._given = given
        numbers = numbers_of(given)
        self._numbers = {name: value for name, value in numbers.items() if name not in dict(auto.configs[0])}
        asked = f"call {auto.kernel.source.name}"
        exchanged = next((tensor for tensor in map(tensor_of, self._stored(auto.asked)) if tensor is not None), None)
        if exchanged is None:
            found = f"{' and '.join(auto.asked)} is no tensor"
            raise InputError(asked, found, "Pass this rank's part of what is exchanged")
        held = {tensor: tensor_of(self._stored((tensor,))[0]) for tensor in auto.asked}
        dtypes = {tensor: one.dtype for tensor, one in held.items() if one is not None}
        unknown = next((dtype for dtype in dtypes.values() if dtype not in MOVED), None)
        if unknown is not None:
            raise InputError(asked, f"{unknown}", f"Use one of {', '.join(MOVED.values())}")
        self.device, self._dtypes = exchanged.device, {tensor: MOVED[dtype] for tensor, dtype in dtypes.items()}
        self._trial = TimedTrial(self, EFFORT)
        self._options = tuple(sorted(options.items()))
        self._target = target_of(self.device)
        where = (self.device.type, tuple(self._dtypes.items()), group.world_size)
        self.signature = (tuple(self._numbers.items()), self._options, *where)

    @property
    def key(self) -> str:
        """Of everything that a measurement depends on. Ranks have the same: where only other numbers differ, such as
        the place of a rank's queries, the tiles are the same."""
        auto = self._auto
        return content_key(
            auto.kernel.source.text,
            auto.kernel.source.name,
            sorted((tensor, repr(how)) for tensor, how in auto.asked.items()),
            [(constants, auto.kernel.space({**self._numbers, **dict(constants)})) for constants in auto.configs],
            self._options,
            sorted(self._dtypes.items()),
            fingerprint(self._target, self.group.world_size),
        )

    def judged(self) -> tuple[RankedWay, ...]:
        predict = self._auto._prediction(self._numbers, self.group.world_size, self._dtypes)
        machine = prediction_machine(self._target, self.group.world_size)
        return rank_ways(self._auto.asked, self._auto.configs, predict, machine)

    def run(self, way: KernelWay) -> None:
        fused, constants = self._auto.fused(way), dict(way.constants)
        fused(*self._arguments, group=self.group.process_group, **self._named, **constants)

    def autotuned(self, judged: tuple[RankedWay, ...]) -> tuple[TimedWay, ...]:
        """All times, those of the last few first, which were taken side by side. Collective.

        Raises InputError, on every rank, if none runs.
        """

        def vary(times: dict[KernelWay, float]) -> tuple[KernelWay, ...]:
            return refinements(judged[0].candidate.constants, tuple(times), self._auto.asked)

        times = search(self.measured, shortlist(judged), vary, FINALISTS)
        if not times:
            asked, left_out = f"tune {self._auto.kernel.source.name}", self._trial.left_out
            found = f"none of {len(left_out)} ways runs; {list(left_out.items())[:1]}"
            raise InputError(asked, found, "Call one by name to see why")
        return tuple(TimedWay(way, round(us, 3)) for way, us in times.items())

    def measured(self, ways: Iterable[KernelWay]) -> dict[KernelWay, float]:
        """Medians of those that run and write what the first one does, quickest first. Collective."""
        stored = {one.directive.tensor for one in self._auto.kernel.stores}
        (out, *_) = [tensor for tensor in map(tensor_of, self._stored(stored)) if tensor is not None]

        def call(turn: int, way: KernelWay) -> torch.Tensor:
            self.run(way)
            return out

        return self._trial.medians({way: partial(call, way=way) for way in ways})

    def _stored(self, tensors: Any) -> list[Any]:
        """The arguments that hold these tensors."""
        kernel = self._auto.kernel
        said = [one.directive for one in (*kernel.loads, *kernel.stores)]
        return [self._given.get(one.parameter) for one in said if one.tensor in tensors]


def configs_of(kernel: Any, configs: Sequence[Mapping[str, int]]) -> tuple[Constants, ...]:
    """Constants to choose from: those that are given, or those of the kernel's `@triton.autotune`; at least one.

    Raises InputError for configs that do not all name the same things.
    """
    listed: object = configs
    if not isinstance(listed, Sequence) or not all(isinstance(config, Mapping) for config in listed):
        kind = f"got {type(listed).__name__}"
        raise InputError("compile with configs", kind, "Pass a list of mappings, constants by name")
    found = [dict(config) for config in configs] or [_of_autotuner(one) for one in getattr(kernel, "configs", ())]
    known = tuple(dict.fromkeys(tuple(sorted(config.items())) for config in found)) or ((),)
    names = {tuple(name for name, _ in config) for config in known}
    if len(names) > 1 or any(type(value) is not int for config in known for _, value in config):
        listed = "; ".join(" ".join(f"{name}={value}" for name, value in config) for config in known[:3])
        raise InputError("compile with configs", listed, "Give whole numbers for the same names in each")
    return known


def _check_constants(kernel: AnnotatedKernel, configs: tuple[Constants, ...]) -> None:
    """Raises InputError for a config that no call could have."""
    for config in configs:
        options = {name: value for name, value in config if name not in kernel.source.parameters}
        unknown = sorted(options.keys() - set(OPTIONS))
        if unknown:
            asked = f"compile {kernel.source.name} with a config"
            raise InputError(asked, f"{unknown[0][:40]} is unknown", f"Name its parameters, or {', '.join(OPTIONS)}")
        check_options(kernel.source.name, options)


def _of_autotuner(config: Any) -> dict[str, int]:
    """The numbers of a `triton.Config`."""
    launch = {name: getattr(config, name, None) for name in LAUNCH_OPTIONS}
    return {**config.kwargs, **{name: value for name, value in launch.items() if value is not None}}
