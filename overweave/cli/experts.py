"""Schedules of layers of experts from the arguments of commands: a shape, and a routing by its statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from overweave.cli.plans import case_of
from overweave.errors import InputError
from overweave.hardware.machine import Machine
from overweave.ir.plan import Plan
from overweave.ir.schedule import Schedule
from overweave.ir.verify.plan import verify_schedule
from overweave.schedules.records.experts import is_of_experts, operator_and_plan
from overweave.sim.cost import AuthorTile
from overweave.sim.realize import realize

if TYPE_CHECKING:
    from overweave.moe.cases import ExpertsCase
    from overweave.tuner.model.choose import Choice
    from overweave.tuner.space.target import Target

SIZES = ("m", "n", "k")
# What `-o` may say of a layer; m, n and k are its tokens, the columns between its matmuls, and its hidden size.
LAYER_OPTIONS = (*SIZES, "experts", "topk", "skew", "parallel")


def load_for(*names: str) -> None:
    """Import what names of experts need, torch too, before memory is limited for a file beside them."""
    if any(map(is_of_experts, names)):
        import overweave.moe.predicted  # noqa: F401


def schedule_of_experts(name: str, options: dict[str, str], ranks: int) -> Schedule:
    """Return a schedule of a layer, small by default. Raises InputError."""
    from overweave.moe.schedules import schedule_for  # which imports torch

    operator_and_plan(name)
    return schedule_for(name, _case(name, {"m": str(256 * ranks), "n": "512", "k": "128"} | options), ranks)


def plan_of_experts(
    name: str, shape: str | None, options: dict[str, str], place: tuple[int, Machine]
) -> tuple[Plan, AuthorTile]:
    """Return the plan of a layer on ranks of a machine, and what its kernels take. shape: tokens, columns between the
    matmuls, hidden size. Raises InputError."""
    from overweave.moe.predicted import LayerCosts
    from overweave.moe.schedules import schedule_for

    operator_and_plan(name)
    ranks, machine = place
    case = _case_of_shape(f"simulate {name}", name, shape, options)
    schedule = schedule_for(name, case, ranks)
    verify_schedule(schedule).raise_if_refused()
    return realize(schedule, machine), LayerCosts(case, ranks, machine)


def explained_choice(operator: str, shape: str, options: dict[str, str], place: tuple[int, Target]) -> Choice:
    """Return which plan a layer of experts takes on ranks of a target. Raises InputError."""
    from overweave.moe.explain import explain_layer

    ranks, target = place
    if twice := [key for key in SIZES if key in options]:
        raise InputError(
            f"explain {operator}", f"--shape beside -o {twice[0]}=", "Say the sizes once, as --shape M,N,K"
        )
    sizes = case_of(shape)
    case = _case(operator, {"m": str(sizes.m), "n": str(sizes.n), "k": str(sizes.k), **options})
    return explain_layer(operator, case, ranks, target)


def _case_of_shape(asked: str, name: str, shape: str | None, options: dict[str, str]) -> ExpertsCase:
    if shape is None:
        raise InputError(asked, "no shape", "Give --shape M,N,K: tokens, columns of an expert, hidden size")
    if twice := [key for key in SIZES if key in options]:
        raise InputError(asked, f"--shape beside -o {twice[0]}=", "Say the sizes once, as --shape M,N,K")
    sizes = case_of(shape)
    return _case(name, {"m": str(sizes.m), "n": str(sizes.n), "k": str(sizes.k), **options})


def _case(name: str, options: dict[str, str]) -> ExpertsCase:
    from overweave.moe.cases import ExpertsSet

    fields = {"experts": "8", "topk": "2", "skew": "0", "parallel": "tensor", **options}
    valid = f"Options of layers: {', '.join(LAYER_OPTIONS)}"
    if unknown := [key for key in fields if key not in LAYER_OPTIONS]:
        raise InputError(f"layer for {name}", f"{unknown[0][:60]!r} is unknown", valid)
    layer = {
        "name": name, "tokens": fields["m"], "intermediate": fields["n"], "hidden": fields["k"],
        "experts": fields["experts"], "topk": fields["topk"],
    }  # fmt: skip
    one = {"cases": [layer], "parallel": [fields["parallel"]], "skews": [fields["skew"]]}
    try:
        chosen = msgspec.convert(one, ExpertsSet, strict=False)
    except msgspec.MsgspecError as error:
        raise InputError(f"layer for {name}", str(error), valid) from None
    return chosen.cases[0].case(chosen.parallel[0], chosen.cases[0].tokens, chosen.skews[0])
