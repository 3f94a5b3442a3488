"""`compile_auto`: kernels whose schedules and constants are chosen, by simulation, or by measurement (`tune`)."""

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
    EXCHANGED_DTYPES,
    LAUNCH_OPTIONS,
    check_has_schedule,
    check_options,
    check_plan_arguments,
    integer_arguments,
    kernel_location,
)
from overweave.ops.author.compile import OPTIONS, FusedKernel, bind_arguments
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
    """Compile as `compile` does, and let calls choose schedules: `all_gather.auto` stands for every `all_gather.*`.

    schedule: of each exchanged tensor, automatic, named, or a list of moves, for whose Puts with `mover="auto"` every
    back end is tried; one alone is that of the first tensor that is loaded, or stored.
    configs: constants to choose from, too: of the kernel's tile, of its launch, and `tile_group`, which calls then
    leave out; by default those of its `@triton.autotune`. tile_us: microseconds of one tile while all SMs are busy, for
    the model; by default estimated from the bytes and flops of a tile (sim/cost.py).

    Returns a callable as `compile` does, whose calls wait and raise alike. Each new set of integer arguments is
    simulated once; `tune` measures, collectively. On a CPU the model is of an H200. Raises DirectiveError for a kernel
    that cannot be compiled, and InputError for invalid schedules and configs.
    SOURCE: AutoOverlap 5.3.
    """
    annotated = kernel_of(*kernel_location(kernel))
    choices = schedule.values() if isinstance(schedule, Mapping) else (schedule,)
    if not all(isinstance(choice, str | Gather | Reduction | AllToAll) for choice in choices):
        cure = "Pass names, such as all_gather.auto, or lists of moves"
        raise InputError("compile_auto", f"schedule {str(schedule)[:60]}", cure)
    if not isinstance(schedule, Mapping):
        loads, stores = ([one.directive.tensor for one in side] for side in (annotated.loads, annotated.stores))
        schedule = dict.fromkeys((loads if side_of(schedule) == GATHER else stores)[:1], schedule)
    if tile_us is not None and not (isinstance(tile_us, int | float) and 0 < tile_us < inf):
        raise InputError("compile_auto: tile_us", f"got {str(tile_us)[:40]!r}", "Pass microseconds above 0, or None")
    constant_sets = configs_of(kernel, configs)
    _check_constants(annotated, constant_sets)
    return AutoFused(annotated, schedule, constant_sets, tile_us)


class AutoFused:
    """A kernel whose schedules and constants are chosen for each set of integer arguments: by a stored tuning, else
    by the model. All ranks choose alike, or the call raises RankMismatch.
    """

    def __init__(
        self,
        kernel: AnnotatedKernel,
        choices: Mapping[str, ScheduleChoice],
        configs: tuple[Constants, ...],
        tile_us: float | None,
    ) -> None:
        """choices: tensor -> schedules to choose from. configs: at least one; `((),)` if no constant is chosen."""
        self.kernel, self.configs, self._tile_us = kernel, configs, tile_us
        loads, stores = ([one.directive.tensor for one in side] for side in (kernel.loads, kernel.stores))
        self.choices = {
            tensor: with_side(choice, tensor in loads) if isinstance(choice, str) else choice
            for tensor, choice in choices.items()
        }
        check_has_schedule(kernel.source.name, self.choices)
        wanted_of(loads, stores, {tensor: choice for tensor, choice in self.choices.items() if not is_auto(choice)})
        for tensor, choice in self.choices.items():
            tensors = loads if side_of(choice) == GATHER else stores
            if tensor not in tensors:
                found = f"the kernel {'reads' if tensors is loads else 'writes'} {', '.join(tensors) or 'none'}"
                raise InputError(f"schedule {str(choice)[:40]!r} for {tensor[:40]!r}", found, "Name one of its tensors")
        gathered = {tensor for tensor, choice in self.choices.items() if side_of(choice) == GATHER}
        check_exchanged(kernel, gathered, self.choices.keys() - gathered)
        self._fused: dict[tuple[tuple[str, str], ...], FusedKernel] = {}
        self._choice: dict[tuple[Any, ...], KernelWay] = {}

    def __call__(self, *arguments: Any, group: GroupLike = None, **keywords: Any) -> None:
        """Run the chosen schedules and constants on this rank. Waits and raises as a `FusedKernel` does."""
        resolved = group_of(group)
        try:
            call = _Call(self, resolved, arguments, keywords)
            if call.signature not in self._choice:
                tuned = read_tuning(self.kernel.source.name, call.key, self.choices, self.configs)
                self._choice[call.signature] = tuned.times[0].way if tuned else predicted_best(call.ranked())
        except OverweaveError as error:
            raise refuse(resolved, error) from None
        call.run(self._choice[call.signature])

    def tune(self, *arguments: Any, group: GroupLike = None, **keywords: Any) -> tuple[TimedWay, ...]:
        """Time the candidates that the model ranks best, then the neighbours of the fastest, and store the times.
        Collective; takes seconds.

        Returns the times, the fastest first; the first few were timed again, interleaved. Later calls with the same
        integer arguments take the first, in other processes, too. On a CPU nothing is measured or stored: the times are
        the model's. Raises InputError, also if no candidate runs, and RankMismatch.
        """
        resolved = group_of(group)
        try:
            call = _Call(self, resolved, arguments, keywords)
            ranked = call.ranked()
        except OverweaveError as error:
            raise refuse(resolved, error) from None
        if call.device.type != "cuda":
            first = predicted_best(ranked)
            self._choice[call.signature] = first
            times = [TimedWay(each.candidate, each.predicted_us) for each in ranked if each.predicted_us is not None]
            return tuple(sorted(times, key=lambda one: (one.way != first, one.us)))
        with current(call.device):
            measured = TunedTimes(call.key, call.autotuned(ranked))
        self._choice[call.signature] = measured.times[0].way
        if resolved.rank == 0:
            save_tuning(self.kernel.source.name, measured)
        return measured.times

    def rank(
        self, numbers: Mapping[str, int], world_size: int, dtype: Dtype = "bfloat16", target: Target | None = None
    ) -> tuple[RankedWay, ...]:
        """Return the predicted time of every candidate, the fastest first; runs nothing. numbers: the kernel's integer
        arguments, without those of `configs`. Raises InputError for arguments that no call could have."""
        return _quickest_first(self._rank_candidates(numbers, world_size, dtype, target))

    def explain(
        self, numbers: Mapping[str, int], world_size: int, dtype: Dtype = "bfloat16", target: Target | None = None
    ) -> str:
        """Return a text: which candidate runs untuned, and each candidate's predicted time or why it is impossible.

        Runs nothing. Raises InputError for arguments that no call could have, and if no candidate is possible."""
        ranked = self._rank_candidates(numbers, world_size, dtype, target)
        if all(one.obstacle for one in ranked):
            asked = f"explain {self.kernel.source.name} on {world_size} ranks"
            raise InputError(asked, f"none of {len(ranked)} ways can be; {ranked[0].obstacle}", "Mend this first")
        taken = predicted_best(ranked)
        width = max(len(str(one.candidate)) for one in ranked)
        lines = (f"  {'->' if one.candidate == taken else '  '} {one.line(width)}" for one in _quickest_first(ranked))
        return "\n".join(
            [
                f"{taken} runs. The library's way runs unless another is predicted to be well ahead.",
                SOURCES["model"],
                f"Its directives were read and proven of every place; {self.fused(taken).checked}.",
                *candidate_counts(ranked),
                *lines,
            ]
        )

    def _rank_candidates(
        self, numbers: Mapping[str, int], world_size: int, dtype: Dtype, target: Target | None
    ) -> tuple[RankedWay, ...]:
        """Return all candidates with predicted times. Raises InputError for arguments that no call could have."""
        check_plan_arguments(self.kernel.source, numbers, world_size, dtype)
        machine = prediction_machine(target or Target("cpu"), world_size)
        return rank_ways(self.choices, self.configs, self._prediction(numbers, world_size, dtype), machine)

    def _prediction(
        self, numbers: Mapping[str, int], world_size: int, dtype: Dtype | Mapping[str, MovedDtype]
    ) -> Callable[[KernelWay, Machine], float]:
        """Return the model: the simulated time of a candidate on a machine, in microseconds."""
        planned_dtype = dtype if isinstance(dtype, str) else plan_dtype(dtype.values())

        def predict(way: KernelWay, machine: Machine) -> float:
            space, fused = self.kernel.space({**numbers, **dict(way.constants)}), self.fused(way)
            group = dict(way.constants).get("tile_group", TILE_GROUP)
            plan = author_plan(space, fused.schedules, world_size, dtype, None, fused.dual_source, group)
            return total_us(plan, machine, self._tile_us or estimate_tile_us(machine, space, planned_dtype))

        return predict

    def fused(self, way: KernelWay) -> FusedKernel:
        """Return the kernel fused by the schedules of a candidate, compiled once."""
        if way.exchanges not in self._fused:
            schedules = {tensor: close_choices(self.choices[tensor], words) for tensor, words in way.exchanges}
            self._fused[way.exchanges] = FusedKernel(self.kernel, schedules)
        return self._fused[way.exchanges]


def _quickest_first(ranked: tuple[RankedWay, ...]) -> tuple[RankedWay, ...]:
    return tuple(sorted(ranked, key=lambda each: each.us))


class _Call:
    """One call of an AutoFused: its arguments by name, and everything that the choice depends on.

    signature: of the arguments, by which this process remembers its choice.
    """

    def __init__(self, auto: AutoFused, group: Group, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        self._auto, self.group, self._arguments, self._keywords = auto, group, arguments, dict(keywords)
        call_args, options = bind_arguments(auto.kernel, arguments, {**keywords, **dict(auto.configs[0])})
        twice = [name for name, _ in auto.configs[0] if name in keywords]
        if twice:
            asked = f"call {auto.kernel.source.name} with {', '.join(twice)}"
            raise InputError(asked, "it is chosen from configs", "Leave it out, or compile without configs")
        self._call_args = call_args
        numbers = integer_arguments(call_args)
        self._numbers = {name: value for name, value in numbers.items() if name not in dict(auto.configs[0])}
        asked = f"call {auto.kernel.source.name}"
        exchanged = next((tensor for tensor in map(tensor_of, self._stored(auto.choices)) if tensor is not None), None)
        if exchanged is None:
            found = f"{' and '.join(auto.choices)} is no tensor"
            raise InputError(asked, found, "Pass this rank's part of what is exchanged")
        tensors = {tensor: tensor_of(self._stored((tensor,))[0]) for tensor in auto.choices}
        dtypes = {tensor: one.dtype for tensor, one in tensors.items() if one is not None}
        unknown = next((dtype for dtype in dtypes.values() if dtype not in EXCHANGED_DTYPES), None)
        if unknown is not None:
            raise InputError(asked, f"{unknown}", f"Use one of {', '.join(EXCHANGED_DTYPES.values())}")
        self.device, self._dtypes = (
            exchanged.device,
            {tensor: EXCHANGED_DTYPES[dtype] for tensor, dtype in dtypes.items()},
        )
        self._trial = TimedTrial(self, EFFORT)
        self._options = tuple(sorted(options.items()))
        self._target = target_of(self.device)
        where = (self.device.type, tuple(self._dtypes.items()), group.world_size)
        self.signature = (tuple(self._numbers.items()), self._options, *where)

    @property
    def key(self) -> str:
        """The key of stored times: a digest of everything that they depend on; equal on all ranks, also if they pass
        different integers that do not change the tiles, such as the offset of a rank's queries."""
        auto = self._auto
        return content_key(
            auto.kernel.source.text,
            auto.kernel.source.name,
            sorted((tensor, repr(choice)) for tensor, choice in auto.choices.items()),
            [(constants, auto.kernel.space({**self._numbers, **dict(constants)})) for constants in auto.configs],
            self._options,
            sorted(self._dtypes.items()),
            fingerprint(self._target, self.group.world_size),
        )

    def ranked(self) -> tuple[RankedWay, ...]:
        """Return all candidates with predicted times."""
        predict = self._auto._prediction(self._numbers, self.group.world_size, self._dtypes)
        machine = prediction_machine(self._target, self.group.world_size)
        return rank_ways(self._auto.choices, self._auto.configs, predict, machine)

    def run(self, way: KernelWay) -> None:
        """Run the call with the schedules and constants of a candidate."""
        fused, constants = self._auto.fused(way), dict(way.constants)
        fused(*self._arguments, group=self.group.process_group, **self._keywords, **constants)

    def autotuned(self, ranked: tuple[RankedWay, ...]) -> tuple[TimedWay, ...]:
        """Search the candidates by time; return all times, first those of the finalists, which are timed interleaved.

        Collective. Raises InputError, on every rank, if no candidate runs.
        """

        def vary(times: dict[KernelWay, float]) -> tuple[KernelWay, ...]:
            return refinements(ranked[0].candidate.constants, tuple(times), self._auto.choices)

        times = search(self.measured, shortlist(ranked), vary, FINALISTS)
        if not times:
            asked, left_out = f"tune {self._auto.kernel.source.name}", self._trial.left_out
            found = f"none of {len(left_out)} ways runs; {list(left_out.items())[:1]}"
            raise InputError(asked, found, "Call one by name to see why")
        return tuple(TimedWay(way, round(us, 3)) for way, us in times.items())

    def measured(self, ways: Iterable[KernelWay]) -> dict[KernelWay, float]:
        """Return the median times of candidates that run and store what the first stores, fastest first. Collective."""
        stored = {one.directive.tensor for one in self._auto.kernel.stores}
        (out, *_) = [tensor for tensor in map(tensor_of, self._stored(stored)) if tensor is not None]

        def call(turn: int, way: KernelWay) -> torch.Tensor:
            self.run(way)
            return out

        return self._trial.medians({way: partial(call, way=way) for way in ways})

    def _stored(self, tensors: Any) -> list[Any]:
        """Return the arguments that are these tensors."""
        kernel = self._auto.kernel
        directives = [one.directive for one in (*kernel.loads, *kernel.stores)]
        return [self._call_args.get(one.parameter) for one in directives if one.tensor in tensors]


def configs_of(kernel: Any, configs: Sequence[Mapping[str, int]]) -> tuple[Constants, ...]:
    """Return the sets of constants to choose from: `configs`, else those of `@triton.autotune`, else one empty set.

    Raises InputError for configs that do not all name the same constants, or whose values are not integers.
    """
    config_list: object = configs
    if not isinstance(config_list, Sequence) or not all(isinstance(config, Mapping) for config in config_list):
        found = f"got {type(config_list).__name__}"
        raise InputError("compile with configs", found, "Pass a list of mappings, constants by name")
    dicts = [dict(config) for config in configs] or [_config_constants(one) for one in getattr(kernel, "configs", ())]
    unique_configs = tuple(dict.fromkeys(tuple(sorted(config.items())) for config in dicts)) or ((),)
    names = {tuple(name for name, _ in config) for config in unique_configs}
    if len(names) > 1 or any(type(value) is not int for config in unique_configs for _, value in config):
        texts = "; ".join(" ".join(f"{name}={value}" for name, value in config) for config in unique_configs[:3])
        raise InputError("compile with configs", texts, "Give whole numbers for the same names in each")
    return unique_configs


def _check_constants(kernel: AnnotatedKernel, configs: tuple[Constants, ...]) -> None:
    """Raise InputError for a config that names neither a parameter nor a launch option, or has an invalid value."""
    for config in configs:
        options = {name: value for name, value in config if name not in kernel.source.parameters}
        unknown = sorted(options.keys() - set(OPTIONS))
        if unknown:
            asked = f"compile {kernel.source.name} with a config"
            raise InputError(asked, f"{unknown[0][:40]} is unknown", f"Name its parameters, or {', '.join(OPTIONS)}")
        check_options(kernel.source.name, options)


def _config_constants(config: Any) -> dict[str, int]:
    """Return the kernel constants and launch options of a `triton.Config`."""
    launch = {name: getattr(config, name, None) for name in LAUNCH_OPTIONS}
    return {**config.kwargs, **{name: value for name, value in launch.items() if value is not None}}
