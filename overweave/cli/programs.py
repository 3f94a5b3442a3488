"""Schedules of programs of their own, layers of experts and attention, from the arguments of commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from overweave.cli.plans import case_of
from overweave.errors import InputError
from overweave.hardware.machine import Machine
from overweave.ir.plan import Plan
from overweave.ir.schedule import Schedule
from overweave.ir.verify.plan import verify_schedule
from overweave.schedules.records.attention import ATTENTION
from overweave.schedules.records.experts import EXPERTS
from overweave.schedules.records.programs import Programs
from overweave.sim.cost import AuthorTile
from overweave.sim.realize import realize

if TYPE_CHECKING:
    from overweave.attention.cases import AttentionCase
    from overweave.moe.cases import ExpertsCase
    from overweave.tuner.model.choose import Choice
    from overweave.tuner.space.target import Target

OptionValues = Mapping[str, str]


class CaseWriters(NamedTuple):
    """What makes schedules of a case, and says what their kernels take: imported where it is asked for, with torch.
    schedule: by name, case and ranks. costs: by name, case, ranks and machine."""

    schedule: Callable[[str, Any, int], Schedule]
    costs: Callable[[str, Any, int, Machine], AuthorTile]


class Described(NamedTuple):
    """How options describe a case of a family. sizes: what M,N,K of --shape are called; meanings: in words. others: the
    other options, with their values where nothing is said."""

    family: Programs
    sizes: tuple[str, str, str]
    meanings: str
    others: dict[str, str]
    small: Callable[[int], dict[str, str]]
    case: Callable[[str, OptionValues], Any]
    made: Callable[[], CaseWriters]

    @property
    def options(self) -> tuple[str, ...]:
        """Return all that `-o` may say."""
        return (*self.sizes, *self.others)

    def case_of(self, name: str, options: OptionValues) -> Any:
        """Return a case. Raises InputError."""
        valid = f"Options of {self.family.subject}: {', '.join(self.options)}"
        if unknown := [key for key in options if key not in self.options]:
            raise InputError(f"{self.family.subject} for {name}", f"{unknown[0][:60]!r} is unknown", valid)
        try:
            return self.case(name, self.others | dict(options))
        except msgspec.MsgspecError as error:
            raise InputError(f"{self.family.subject} for {name}", str(error), valid) from None

    def case_of_shape(self, command: str, name: str, shape: str | None, options: OptionValues) -> Any:
        """Return a case whose sizes --shape says. Raises InputError."""
        asked = f"{command} {name}"
        if shape is None:
            raise InputError(asked, "no shape", f"Give --shape M,N,K: {self.meanings}")
        if twice := [key for key in self.sizes if key in options]:
            raise InputError(asked, f"--shape beside -o {twice[0]}=", "Say the sizes once, as --shape M,N,K")
        shaped = case_of(shape)
        sizes = dict(zip(self.sizes, map(str, (shaped.m, shaped.n, shaped.k)), strict=True))
        return self.case_of(name, sizes | dict(options))


def _experts_case(name: str, options: OptionValues) -> ExpertsCase:
    from overweave.moe.cases import ExpertsSet

    layer = {
        "name": name, "tokens": options["m"], "intermediate": options["n"], "hidden": options["k"],
        "experts": options["experts"], "topk": options["topk"],
    }  # fmt: skip
    one = {"cases": [layer], "parallel": [options["parallel"]], "skews": [options["skew"]]}
    chosen = msgspec.convert(one, ExpertsSet, strict=False)
    return chosen.cases[0].case(chosen.parallel[0], chosen.cases[0].tokens, chosen.skews[0])


def _experts_made() -> CaseWriters:
    from overweave.moe.predicted import LayerCosts
    from overweave.moe.schedules import schedule_for

    return CaseWriters(schedule_for, lambda name, case, ranks, machine: LayerCosts(case, ranks, machine))


def _attention_case(name: str, options: OptionValues) -> AttentionCase:
    from overweave.attention.cases import AttentionCase

    fields = {key: options[key] for key in ("tokens", "heads", "head_dim", "batch", "layout")}
    fields |= {"groups": options["groups"] or options["heads"], "heads_name": name, "is_causal": options["causal"]}
    window = {"window": options["window"]} if options["window"] else {}
    return msgspec.convert(fields | window, AttentionCase, strict=False)


def _attention_made() -> CaseWriters:
    from overweave.attention.predicted import AttentionCosts
    from overweave.attention.schedules import schedule_for

    return CaseWriters(schedule_for, lambda name, case, ranks, machine: AttentionCosts(case, ranks, machine, name))


_DESCRIBED = (
    Described(
        EXPERTS,
        ("m", "n", "k"),
        "tokens, columns of an expert, hidden size",
        {"experts": "8", "topk": "2", "skew": "0", "parallel": "tensor"},
        lambda ranks: {"m": str(256 * ranks), "n": "512", "k": "128"},
        _experts_case,
        _experts_made,
    ),
    Described(
        ATTENTION,
        ("tokens", "heads", "head_dim"),
        "tokens of all ranks, heads, columns of a head",
        {"groups": "", "batch": "1", "causal": "true", "layout": "zigzag", "window": ""},
        lambda ranks: {"tokens": str(64 * ranks), "heads": str(2 * ranks), "head_dim": "64"},
        _attention_case,
        _attention_made,
    ),
)
FAMILIES = tuple(each.family for each in _DESCRIBED)


def family_of(name: str) -> Programs | None:
    """Return the family that a schedule's name belongs to, if any."""
    return next((family for family in FAMILIES if family.has(name)), None)


def names() -> tuple[str, ...]:
    """Return every schedule of a family."""
    return tuple(name for family in FAMILIES for name in family.names())


def load_for(*names: str) -> None:
    """Import what names of families need, torch too, before memory is limited for a file beside them."""
    for each in _DESCRIBED:
        if any(map(each.family.has, names)):
            each.made()


def schedule_of_program(name: str, options: OptionValues, ranks: int) -> Schedule:
    """Return a schedule of a family, small by default. Raises InputError."""
    described = _described(name)
    case = described.case_of(name, described.small(ranks) | dict(options))
    return described.made().schedule(name, case, ranks)


def explained_choice(operator: str, shape: str, options: OptionValues, place: tuple[int, Target]) -> Choice:
    """Return which plan a layer of experts takes on ranks of a target. Raises InputError."""
    from overweave.moe.explain import explain_layer

    case = _described(f"{operator}.{next(iter(EXPERTS.plans))}").case_of_shape("explain", operator, shape, options)
    return explain_layer(operator, case, *place)


def plan_of_program(
    name: str, shape: str | None, options: OptionValues, place: tuple[int, Machine]
) -> tuple[Plan, AuthorTile]:
    """Return the plan of a case on ranks of a machine, and what its kernels take. Raises InputError."""
    described, (ranks, machine) = _described(name), place
    case, made = described.case_of_shape("simulate", name, shape, options), described.made()
    schedule = made.schedule(name, case, ranks)
    verify_schedule(schedule).raise_if_refused()
    return realize(schedule, machine), made.costs(name, case, ranks, machine)


def _described(name: str) -> Described:
    """Return how a name's family is described. Raises InputError for a name of none."""
    described = next(each for each in _DESCRIBED if each.family.has(name))
    described.family.operator_and_plan(name)
    return described
