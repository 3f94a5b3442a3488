"""The schedules that operators have, by name: what each is made of, and what can be asked of it."""

from __future__ import annotations

from overweave.schedules import options
from overweave.schedules.forms import ALL_GATHER_MATMUL
from overweave.schedules.template import Template

MATMUL_REDUCE_SCATTER = "matmul_reduce_scatter"
MATMUL_ALL_REDUCE = "matmul_all_reduce"

_MOVER = (options.MOVER, options.COPY_PROGRAMS)
_FUSED = (options.PIECES, options.ORDER, *options.TILES)
_PUSHED = (options.PIECES, options.ORDER, *_MOVER, *options.TILES, options.ROTATION)
# Beside what stores at peers, the assembler has no register left for shares along k.
_STORED_ROUND = (options.PIECES, *(option for option in options.TILES if option.name != "split_k"))
_STORED = (options.ORDER, *_STORED_ROUND)
_CUT, _PACKED = (options.PIECES, options.COL_PIECES), (options.MATMUL,)
_AG, _RS, _AR = ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, MATMUL_ALL_REDUCE
TEMPLATES: dict[str, Template] = {
    f"{_AG}.sequential": Template(_AG, "collective", False, "library all-gather, then one library matmul"),
    f"{_AG}.per_shard": Template(
        _AG, "push", False, "shards pushed by copy engine, one library matmul per shard", (options.ORDER,)
    ),
    f"{_AG}.push": Template(
        _AG, "push", True, "pieces pushed by copy engine or kernel, tiles of one kernel wait", _PUSHED
    ),
    f"{_AG}.gather_packed": Template(
        _AG, "packed", False, "gathered in packed messages, one matmul", _PACKED, helped=True
    ),
    f"{_AG}.pull": Template(
        _AG, "pull", True, "pieces pulled from staged shards, tiles of one kernel wait", (*_FUSED, options.ROTATION)
    ),
    f"{_AG}.mesh": Template(
        _AG,
        "mesh",
        True,
        "chunks by rows and columns go straight to every rank of a mesh, line by line of it",
        (*_CUT, options.ISLAND, options.AXIS, options.LANES, *options.TILES),
    ),
    f"{_AG}.ring": Template(
        _AG, "ring", True, "every rank passes on what came from the next one", (*_CUT, options.LANES, *options.TILES)
    ),
    f"{_AG}.double_ring": Template(
        _AG, "double_ring", True, "two rings, one each way, take a shard's chunks by turns", (*_CUT, *options.TILES)
    ),
    f"{_AG}.islands": Template(
        _AG,
        "islands",
        True,
        "gathered inside islands, while each shard crosses to other islands once and is passed on there",
        (*_CUT, options.ISLAND, *options.TILES),
    ),
    f"{_RS}.sequential": Template(_RS, "collective", False, "one library matmul, then library reduce-scatter"),
    f"{_RS}.per_shard": Template(
        _RS, "scatter", False, "one library matmul per shard, put to its owner, who sums in order", (options.ORDER,)
    ),
    f"{_RS}.scatter": Template(
        _RS,
        "scatter",
        True,
        "tiles of one kernel signal, copy engine scatters pieces, owners sum in order",
        (options.SUMS, options.OWN_PIECES, *_PUSHED),
    ),
    f"{_RS}.scatter_stored": Template(
        _RS,
        "stored",
        True,
        "tiles of one kernel store straight at their owners, whose own tiles, the last, add them in order",
        _STORED,
    ),
    f"{_RS}.ring_stored": Template(
        _RS,
        "ring_stored",
        True,
        "round a ring: tiles add the sum that arrived, and store theirs straight at the next rank, or at last in y",
        _STORED_ROUND,
    ),
    f"{_RS}.scatter_pull": Template(
        _RS,
        "scatter_pull",
        True,
        "tiles of one kernel store locally and owners are told, whose sums beside the last tiles read them there",
        (options.PIECES, options.OWN_PIECES, *options.TILES),
    ),
    f"{_RS}.scatter_packed": Template(
        _RS, "packed", False, "one matmul, packed parts to their owners, who sum in order", _PACKED, helped=True
    ),
    f"{_RS}.fused_ring": Template(
        _RS,
        "fused_ring",
        True,
        "tiles of one kernel add the sum that arrived, pieces travel on round the ring until their owner adds the last",
        (options.PIECES, *options.TILES),
    ),
    f"{_RS}.remote_add": Template(
        _RS,
        "remote_add",
        True,
        "a kernel adds pieces at their owners as they come, in fp32: in no order, so bits may differ between calls",
        (options.PIECES, options.ORDER, options.COPY_PROGRAMS, *options.TILES),
        mover="copy_kernel",
    ),
    f"{_AR}.sequential": Template(_AR, "collective", False, "one library matmul, then library all-reduce"),
    f"{_AR}.one_shot_packed": Template(
        _AR,
        "one_shot_packed",
        False,
        "one matmul, then a kernel pushes packed partials, and sums",
        _PACKED,
        helped=True,
    ),
    f"{_AR}.two_shot_packed": Template(
        _AR,
        "two_shot_packed",
        False,
        "one matmul, then one kernel: owners sum packed parts, and push the sums to all, packed",
        _PACKED,
        helped=True,
    ),
    f"{_AR}.two_shot": Template(
        _AR,
        "two_shot",
        True,
        "tiles of one kernel signal, owners sum pieces in order, copy engine moves parts and sums",
        (options.SUMS, *_FUSED),
    ),
    f"{_AR}.ring_stored": Template(
        _AR,
        "ring_stored",
        True,
        "tiles add what arrived, and store at the next rank, its owner's at every rank; the sums are moved to y",
        _STORED_ROUND,
        moves_behind=True,
    ),
}
# Schedules that are gone, with the one that does their work: no shipped table had a row that any of them won.
REPLACED: dict[str, str] = {
    f"{_AG}.gather": "per_shard",
    f"{_AG}.gather_pull": "gather_packed",
    f"{_RS}.pull": "scatter_pull",
    f"{_RS}.ring": "fused_ring",
    f"{_AR}.one_shot": "one_shot_packed",
    f"{_AR}.one_shot_pull": "one_shot_packed",
    f"{_AR}.two_shot_pull": "two_shot",
    f"{_AR}.two_shot_stored": "ring_stored",
}
REPLACED_OPTIONS = ("sharing",)  # of rows in files that were measured with it
