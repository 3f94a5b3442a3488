"""`overweave explain`: which plan an operator takes for a shape, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import typer
from msgspec import UNSET
from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from overweave.cli.limits import allowed_s, existing_files, limited
from overweave.cli.plans import AFTER_HELP, SHAPE_HELP, case_of, options_of, report_rounding
from overweave.cli.programs import explained_choice, load_for
from overweave.errors import InputError
from overweave.ir.operators.registry import operator_of
from overweave.ops.explain import device_of, target_for
from overweave.schedules.records.experts import EXPERTS
from overweave.tuner.model.candidate_model import State
from overweave.tuner.model.choose import Choice, explain_choice
from overweave.tuner.model.heuristic import advise, applies_to
from overweave.tuner.space.shapes import DtypeWord
from overweave.tuner.space.target import target_named

RANKS_OF_A_FILE = 4  # ranks that the time for a file's size covers; more ranks get more time

# State of a candidate -> colour of its row.
STYLES: dict[State, str] = {"measured": "green", "simulated": "yellow", "impossible": "dim", "unknown": "dim italic"}


def explain(
    operator: Annotated[
        str,
        typer.Argument(
            metavar="OP", help="An operator, such as all_gather_matmul; or FILE.py:KERNEL, with options of its own"
        ),
    ],
    shape: Annotated[str, typer.Option(help=SHAPE_HELP)],
    world: Annotated[int, typer.Option("--world", "-w", min=1, max=1024, help="How many ranks")] = 4,
    dtype: Annotated[DtypeWord, typer.Option(help="fp8: e4m3, scaled by rows, into bf16")] = "bf16",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="cuda without a GPU at hand means an H200")] = "cuda",
    after: Annotated[str, typer.Option(help=AFTER_HELP)] = "",
    machine: Annotated[
        str | None, typer.Option(help="A machine, or a file of one: what its GPUs would take; else the GPU at hand")
    ] = None,
    norm: Annotated[bool, typer.Option("--norm", help="As --after residual+rms_norm")] = False,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="key=value of experts: experts, topk, skew, parallel")
    ] = None,
) -> None:
    """Say which plan an operator would take for a shape, and why."""
    if EXPERTS.has(operator):
        _explain_experts(operator, shape, option or (), (world, dtype, device, machine), norm or bool(after))
        return
    record = operator_of(operator, "explain")
    if option:
        raise InputError(f"explain {operator[:60]} -o {option[0][:60]}", "only experts have options", "Leave -o out")
    if norm and after:
        raise InputError(f"explain --norm --after {after[:60]}", "two endings", "Join all of it by + behind --after")
    case = case_of(shape, "residual+rms_norm" if norm else after)
    if machine is not None and device == "cpu":
        raise InputError(f"explain --machine {machine[:60]} --device cpu", "a CPU", "Leave one of the two out")
    problem, files = case.problem(operator, world, dtype), existing_files(machine)
    seconds = allowed_s(*files) * max(1.0, world / RANKS_OF_A_FILE)
    with limited(*files, seconds=seconds):
        target = (
            target_named(machine, world) if machine is not None else target_for(device_of("explain", device), world)
        )
        problem, where = replace(problem, islands=target.islands or UNSET), target.machine(world)
        advice = advise(problem, where) if where is not None and applies_to(problem, where) else None
        choice = explain_choice(problem, target)
    report_rounding(record, case, world)
    _print_choice(choice)
    if advice is not None:
        typer.echo(f"For comparison, and without a say in what runs, the {advice}")


def _explain_experts(
    operator: str,
    shape: str,
    options: Sequence[str],
    place: tuple[int, DtypeWord, Literal["cpu", "cuda"], str | None],
    is_followed: bool,
) -> None:
    """Say which plan a layer of experts takes. Raises InputError for what layers have not."""
    world, dtype, device, machine = place
    asked = f"explain {operator}"
    if operator not in EXPERTS.operators:
        plan = operator.partition(".")[2]
        raise InputError(
            asked[:60], f"{plan[:40]!r} is a plan" if plan else "a part of a name", "Name the operator alone"
        )
    if is_followed:
        raise InputError(f"{asked} --after", "layers of experts end as they are", "Leave --after and --norm out")
    if dtype != "bf16":
        raise InputError(f"{asked} --dtype {dtype}", "layers are predicted in bf16", "Leave --dtype out")
    if machine is not None and device == "cpu":
        raise InputError(f"{asked} --machine {machine[:60]} --device cpu", "a CPU", "Leave one of the two out")
    load_for(operator)
    with limited(*existing_files(machine)):
        target = (
            target_named(machine, world) if machine is not None else target_for(device_of("explain", device), world)
        )
        choice = explained_choice(operator, shape, options_of(options), (world, target))
    _print_choice(choice)


def _print_choice(choice: Choice) -> None:
    console = Console(highlight=False, emoji=False)
    for sentence in choice.sentences():
        console.print(sentence, markup=False, soft_wrap=True)
    for state, line in choice.rows():
        console.print(Text(line, style=STYLES[state]), soft_wrap=True)
