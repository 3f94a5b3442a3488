"""Methods that authors' kernels alone have: transports of a tensor that their tiles read or write."""

from __future__ import annotations

from functools import partial

from overweave.ir.operators import all_gather_matmul, matmul_all_reduce, matmul_all_to_all, matmul_reduce_scatter
from overweave.ir.plan import AUTHOR_KERNEL, COPY_ENGINE, LIBRARY, REDUCE_KERNEL
from overweave.schedules.methods import exchanges, gathers
from overweave.schedules.methods.by_moves import by_moves, summed_in_waves, sums_of_moves
from overweave.schedules.moves import gather_templates, island_templates, reduction_templates
from overweave.schedules.records import options
from overweave.schedules.records.record import Adds, Method

_AG, _RS, _AR, _TRADED = (
    each.OPERATOR.name for each in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, matmul_all_to_all)
)
_by_kernel = partial(Method, multiplies=AUTHOR_KERNEL, moves=(COPY_ENGINE,))
_GATHERS = {method.name: method for method in gathers.METHODS}
# name, template of sums, template of the gather by which every rank gets them, summary.
_SUMS = (
    ("mesh", reduction_templates.across_mesh, gather_templates.across_mesh, "chunks go straight to who adds them"),
    ("ring", reduction_templates.round_ring, gather_templates.round_ring, "every rank adds its own, and passes it on"),
    ("double_ring", reduction_templates.round_two_rings, gather_templates.round_two_rings, "two rings, one each way"),
    ("islands", island_templates.sums, island_templates.gather, "added inside islands, whose sums cross"),
)
_WAVES = (
    (_RS, summed_in_waves, "reduce_scatter.waves"),
    (_AR, summed_in_waves, "all_reduce.waves"),
    (_TRADED, exchanges.decomposed, "all_to_all.send_waves"),
)
METHODS = (
    *(
        _by_kernel(
            operator=operator,
            name=name,
            summary=summary,
            write=by_moves(summed, gathered),
            adds=Adds(REDUCE_KERNEL),
            has_levels=_GATHERS[name].has_levels,
            options=_GATHERS[name].options,
        )
        for operator in (_RS, _AR)
        for name, summed, gathered, summary in _SUMS
    ),
    *(
        Method(
            operator=operator,
            name="waves",
            summary="tiles of one kernel signal piece by piece, a library collective of each runs beside the next ones",
            source="FlashOverlap (arXiv 2504.19519) 3.2, groups of waves as pieces of rows",
            write=write,
            multiplies=AUTHOR_KERNEL,
            adds=Adds(LIBRARY, "library", "result") if operator != _TRADED else None,
            transport=transport,
            options=(options.PIECES, options.LIBRARY_SMS),
        )
        for operator, write, transport in _WAVES
    ),
    _by_kernel(
        operator=_AR,
        name="one_shot",
        summary="whole partials go to every peer, and every rank adds them",
        write=partial(sums_of_moves, reduction_templates.one_shot, beside=False),
        adds=Adds(REDUCE_KERNEL),
        options=(options.ORDER,),
    ),
    _by_kernel(
        operator=_AG,
        name="spread",
        transport="spread.push",
        summary="pieces are pushed to every peer as they are stored",
        write=by_moves(gather_templates.push_to_all, sends=True),
        options=(options.PIECES,),
    ),
    Method(
        operator=_AG,
        name="spread_collective",
        transport="spread.collective",
        summary="the library's, behind the kernel",
        write=by_moves(gather_templates.at_once, sends=True),
    ),
)
