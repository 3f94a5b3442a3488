"""`overweave simulate`: the predicted time and timeline of a schedule on a described machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec import UNSET, Struct
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from overweave.cli.limits import errors_as_json, existing_files, limited
from overweave.cli.output_file import HTML_HELP, page_writer, write_file
from overweave.cli.pictures.gantt import print_gantt, print_table
from overweave.cli.plans import case_of, options_of, problem_of, prove, report_rounding
from overweave.cli.plans import load as load_plan
from overweave.cli.programs import family_of, load_for, plan_of_program
from overweave.cli.programs import names as names_of_programs
from overweave.errors import InputError, nearest
from overweave.hardware.cards import machine_of_ranks
from overweave.hardware.machine import Machine, default_for
from overweave.ir.plan import AUTHOR_KERNEL, Plan
from overweave.ir.schedule import Collective, Compute, Schedule
from overweave.ir.text.files import printable
from overweave.ir.timeline.operations import with_contents
from overweave.ir.timeline.timeline import COLLECTIVE, COMPUTE, COPY, REDUCE, WAIT, SpanKind, Timeline
from overweave.ir.timeline.trace import to_chrome
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import METHODS
from overweave.sim.alike import islands_among, ranks_to_simulate, told
from overweave.sim.cost import AuthorTile, Costs, MatmulShape, library_matmul_us, matmul_shape
from overweave.sim.realize import realize
from overweave.sim.simulate import check_machine
from overweave.sim.simulate import simulate as run

_COLUMNS = ("rank", "compute", "copy", "collective", "reduce", "wait", "exposed", "overlap")


class RankReport(Struct, frozen=True):
    rank: int
    compute_us: float
    copy_us: float
    collective_us: float
    reduce_us: float
    wait_us: float
    exposed_us: float
    overlap_ratio: float


class SimulationReport(Struct, frozen=True, kw_only=True):
    """The content of `--json`. effective_communication_us: the call less the fastest un-split matmul (Flux, 5.1)."""

    plan: str
    machine: str
    world_size: int
    total_us: float
    matmul_us: float
    effective_communication_us: float
    exposed_us: float
    overlap_ratio: float
    ranks: tuple[RankReport, ...]


def simulate(
    schedule: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A schedule, or a file of `overweave show`")],
    shape: Annotated[str | None, typer.Option(help="M,N,K of the global matmul, before tensor parallelism")] = None,
    world: Annotated[int | None, typer.Option("--world", "-w", min=1, help="4 unless a file says")] = None,
    machine: Annotated[
        str | None, typer.Option(help="A machine, or a file of one; else H200s, as many as need be")
    ] = None,
    option: Annotated[list[str] | None, typer.Option("--option", "-o", help="key=value for the schedule")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace of every tile for ui.perfetto.dev there")] = None,
    html: Annotated[Path | None, typer.Option(help=HTML_HELP)] = None,
    tile_us: Annotated[
        float | None, typer.Option(min=0.0, help="Of a compiled kernel's plan: what a tile takes, every SM busy")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print numbers for programs instead")] = False,
) -> None:
    """Predict how long a schedule takes on a described machine, and draw it."""
    is_named = schedule in METHODS or family_of(schedule) is not None
    files = (*(() if is_named else (Path(schedule),)), *existing_files(machine))
    load_for(schedule)
    with errors_as_json(schedule, json), limited(*files):
        ranks = 4 if world is None else world
        only: tuple[int, ...] = ()
        write_page, where = page_writer(html), machine_of_ranks(machine or default_for(ranks), ranks)
        kernel_us: AuthorTile | None = tile_us
        if family_of(schedule) is not None:
            plan, kernel_us = plan_of_program(schedule, shape, options_of(option or []), (ranks, where))
        elif is_named:
            only = ranks_to_simulate(where, ranks)
            plan = named_plan(schedule, shape, (ranks, where), options_of(option or []), only)
        else:
            plan = plan_of_file(schedule, (shape, world, option), where)
        if tile_us is not None and (
            kernel_us != tile_us or AUTHOR_KERNEL not in plan.realization.engine_by_queue.values()
        ):
            reason = "the machine's file knows how long the tiles of this plan take"
            raise InputError(f"simulate {schedule[:60]} --tile-us {tile_us:g}", reason, "Leave --tile-us out")
        timeline = run(plan, where, author_tile_us=kernel_us)
        if trace or html:
            tiles = with_contents(run(plan, where, True, kernel_us), plan.schedule, plan.realization.dtype)
            write_page(f"{plan.name} on {where.title}", tiles)
        if trace is not None:
            write_file(trace, to_chrome(tiles))
        report = report_of(plan, where, timeline, only)
        if json:
            typer.echo(msgspec.json.encode(report).decode())
            return
        console = Console()
        print_table(console, _table(report, where))
        print_gantt(console, timeline)
        for line in (*between_hosts(plan, where), *filter(None, [told(only, ranks)])):
            console.print(line, soft_wrap=True, markup=False, highlight=False)


def between_hosts(plan: Plan, machine: Machine) -> Iterator[str]:
    """Yield how NCCL runs each kind of collective that crosses from host to host, as sentences."""
    costs = Costs(plan, machine)
    parts = {(part.function, part.ranks): part for part in plan.schedule.operations if isinstance(part, Collective)}
    yield from dict.fromkeys(
        f"{part.function} over {len(part.ranks)} ranks of several hosts: {crossing.name}, "
        f"{costs.collective_sms(part)} SMs a rank"
        for part in parts.values()
        if (crossing := costs.crossing([part])) is not None
    )


def named_plan(
    name: str, shape: str | None, ranks: tuple[int, Machine], options: dict[str, str], only: tuple[int, ...] = ()
) -> Plan:
    """Return the catalog's plan for a global shape, verified if it has the operations of all ranks (only: of some).
    ranks: how many, and on which machine, whose islands are the plan's. Raises InputError and ScheduleRefused."""
    world_size, machine = ranks
    if shape is None:
        raise InputError(f"simulate {name}", "no shape", "Give --shape M,N,K of the global matmul")
    case = case_of(shape)
    sizes = case.problem(METHODS[name].operator, world_size, "bf16").sizes
    twice = [key for key in sizes if key in options]
    if twice:
        raise InputError(f"simulate {name}", f"--shape beside -o {twice[0]}=", "Say the sizes once, as --shape M,N,K")
    problem, rest = problem_of(name, world_size, {**options, **{key: str(size) for key, size in sizes.items()}})
    problem = replace(problem, islands=islands_among(machine, world_size) or UNSET)
    plan = build(name, problem, rest, only=only)
    report_rounding(problem.record, case, world_size)
    check_machine(plan, machine)  # before a proof that would say less plainly why hosts cannot run it
    if not only:
        prove(plan).raise_if_refused()  # no time for a plan that cannot run, as with rows not aligned to 16 bytes
    return plan


def plan_of_file(name: str, file_options: tuple[object, ...], machine: Machine) -> Plan:
    """Return a file's plan, or its schedule realized for the machine; verified. Raises InputError and ScheduleError.
    file_options: options of the command that do not go with a file."""
    if not Path(name).is_file():
        cure = nearest("Schedules", name, (*METHODS, *names_of_programs()), "overweave show")
        raise InputError(f"simulate {printable(name)}", "neither a schedule nor a file", cure)
    if any(each not in (None, []) for each in file_options):
        raise InputError(
            f"simulate {printable(name)}", "--shape, --world or -o for a file", "A file says all of that itself"
        )
    value = load_plan(Path(name))
    return realize(value, machine) if isinstance(value, Schedule) else value


def report_of(plan: Plan, machine: Machine, timeline: Timeline, only: tuple[int, ...] = ()) -> SimulationReport:
    """Return the numbers of a simulated call. only: the ranks that were simulated, if not all."""
    matmul_us = matmul_alone_us(plan, machine)
    return SimulationReport(
        plan=plan.name,
        machine=machine.name,
        world_size=timeline.world_size,
        total_us=timeline.total_us,
        matmul_us=round(matmul_us, 3),
        effective_communication_us=round(timeline.total_us - matmul_us, 3),
        exposed_us=round(timeline.exposed_us(), 3),
        overlap_ratio=round(timeline.overlap_ratio(), 4),
        ranks=tuple(_rank_report(timeline, rank) for rank in only or range(timeline.world_size)),
    )


def matmul_alone_us(plan: Plan, machine: Machine) -> float:
    """Return the time of the slowest rank's whole matmul as one cuBLAS call."""
    slowest = 0.0
    shapes: dict[int, list[MatmulShape]] = {}
    for part in plan.schedule.operations:
        if isinstance(part, Compute):
            shapes.setdefault(part.rank, []).append(matmul_shape(part))
    for parts in shapes.values():
        whole = sum(rows for rows, _, _ in parts), parts[0][1], parts[0][2]
        slowest = max(slowest, library_matmul_us(machine, whole, plan.realization.dtype))
    return slowest


def _rank_report(timeline: Timeline, rank: int) -> RankReport:
    def busy_us(kind: SpanKind) -> float:
        return round(timeline.busy_us(rank, (kind,)), 3)

    return RankReport(
        rank=rank,
        compute_us=busy_us(COMPUTE),
        copy_us=busy_us(COPY),
        collective_us=busy_us(COLLECTIVE),
        reduce_us=busy_us(REDUCE),
        wait_us=busy_us(WAIT),
        exposed_us=round(timeline.exposed_us(rank), 3),
        overlap_ratio=round(timeline.overlap_ratio(rank), 4),
    )


def _table(report: SimulationReport, machine: Machine) -> Table:
    caption = (
        "us in which a rank did each; exposed: did any of it but computing;\n"
        "overlap: (compute + communication - call) / communication\n"
        f"whole call {report.total_us:.1f} us"
    )
    if report.matmul_us:  # authors' kernels have no cuBLAS matmul to compare with
        caption += f", matmul alone {report.matmul_us:.1f} us, "
        caption += f"effective communication {report.effective_communication_us:.1f} us"
    title = Text(f"{report.plan} on {machine.name}: {machine.title}")
    table = Table(title=title, title_justify="left", title_style="bold")
    table.caption, table.caption_justify = caption, "left"
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for rank in report.ranks:
        number, *times, ratio = msgspec.structs.astuple(rank)
        moves = rank.copy_us or rank.collective_us or rank.reduce_us  # tiles that store at peers count as compute
        table.add_row(str(number), *(f"{time:.1f}" for time in times), f"{ratio:.2f}" if moves else "")
    return table
