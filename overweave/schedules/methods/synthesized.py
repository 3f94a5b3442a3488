"""Methods whose moves are searched for the links of a machine (schedules/synthesis).

Their option `links` names the described machine whose links are searched.
"""

from __future__ import annotations

from functools import partial

from overweave.errors import InputError
from overweave.hardware.cards import machine_for, machine_named
from overweave.hardware.machine import Machine, default_for, names
from overweave.ir.operators import all_gather_matmul, all_to_all_matmul, matmul_reduce_scatter
from overweave.ir.plan import COPY_ENGINE, REDUCE_KERNEL, TILE_KERNEL
from overweave.schedules.communication import PUSHES, TILES, Communication, in_parts
from overweave.schedules.methods.by_moves import by_moves
from overweave.schedules.moves.transfers import transferred
from overweave.schedules.records import needs, option_sets, options
from overweave.schedules.records.movers import mesh_of
from overweave.schedules.records.record import Adds, Method, MethodInputs, MethodRequest, Need
from overweave.schedules.synthesis.templates import all_to_all_on, gather_on, scatter_on

SOURCE = "TACOS (Won et al., MICRO 2024), the synthesis of AutoOverlap 5.1"
LINKS = options.Option(
    name="links", choices=names(), meaning="the described machine whose links are searched; auto: H200s on a switch"
)


def _no_switch(asked: MethodRequest) -> str:
    """Why a device's links are not worth a search."""
    device = asked.device
    if device is None or device.kind != "cuda" or device.links:
        return ""
    return "all GPUs hang on one switch, or their links are described nowhere: there is nothing to search"


def machine_of(work: MethodInputs) -> Machine:
    """Return the machine whose links a call's moves are searched for. Raises InputError if it has no place for so many
    ranks."""
    ranks = work.problem.world_size
    name = work.settings.links or default_for(ranks)
    machine = machine_for(machine_named(name), ranks)
    if machine is None:
        raise InputError(f"links={name} for {ranks} ranks", "it has no place for so many", "Name another machine")
    return machine


def _gathered(work: MethodInputs) -> Communication:
    return by_moves(gather_on(machine_of(work)))(work)


def _scattered(work: MethodInputs) -> Communication:
    return by_moves(scatter_on(machine_of(work)))(work)


def _exchanged(work: MethodInputs) -> Communication:
    split, cols = work.split, work.problem.moved_columns
    moves = all_to_all_on(machine_of(work), mesh_of(split, work.problem, work.settings))
    return in_parts(transferred(moves, split.rows, cols), dict.fromkeys((PUSHES, TILES), split.tile_rows))


_synth = partial(
    Method,
    name="synth",
    lowering="synth",
    source=SOURCE,
    multiplies=TILE_KERNEL,
    moves=(COPY_ENGINE,),
    options=(options.PIECES, LINKS, *options.TILES),
    needs=(Need("choice", _no_switch),),
    grids=({"pieces": (1, 2)},),
    margins=(option_sets.NOT_MEASURED,),
)
METHODS = (
    _synth(
        operator=all_gather_matmul.OPERATOR.name,
        summary="pieces take the ways over a machine's links that a search finds, and ranks on them pass pieces on",
        write=_gathered,
    ),
    _synth(
        operator=matmul_reduce_scatter.OPERATOR.name,
        summary="sums travel to their owners by the ways of a searched gather, backwards",
        write=_scattered,
        adds=Adds(REDUCE_KERNEL, "ways", "result"),
        norms=REDUCE_KERNEL,
    ),
    _synth(
        operator=all_to_all_matmul.OPERATOR.name,
        summary="every rank serves its peers in a searched order, in which copies share no link",
        write=_exchanged,
        needs=(needs.WHOLE_BLOCKS, Need("choice", _no_switch)),
    ),
)
