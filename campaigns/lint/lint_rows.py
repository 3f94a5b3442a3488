"""The kernels that send rows which the device chooses (kernels/rows.py), with what each promises to the lint."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from msgspec.structs import replace

from campaigns.lint.lint_case import SOME, Case, alarm_of, case_of, channel_kind, source_of_kinds, tensor_kind
from overweave.kernels.arguments import RowBounds, RowSizes, SentRows
from overweave.kernels.rows import add_rows_kernel, land_rows_kernel, push_rows_kernel
from overweave.kernels.travelling import choose_ranks_kernel, place_rows_kernel, read_metadata_kernel
from overweave.lang.mapping import TileChannel, Tiles
from overweave.runtime.gpu import travelling
from overweave.runtime.kernel_calls.call import KernelCall
from overweave.runtime.kernel_calls.rows import ADD_WARPS, LAND_WARPS, PUSH_WARPS
from tools.ptx_lint.contract import Contract, Guard

WORLD_SIZES = (2, 4, 8)
PROGRAMS = 12
WARPS = {"push_rows_kernel": PUSH_WARPS, "land_rows_kernel": LAND_WARPS, "add_rows_kernel": ADD_WARPS}
SIZES = RowSizes(3584, 16, 8, 1024, True)  # of what pushes
BOUNDS: Any = RowBounds("i32", "i32", "i32", "i32")
ALONE = replace(SIZES, metadata=0)


def rows_cases() -> Iterator[Case]:
    """Each kernel for each number of ranks, on rank 0 and on rank 1, whose number is a constant to a launch; rows with
    metadata of them, and without."""
    for ranks, rank in product(WORLD_SIZES, ("i32", 1)):
        yield push_case(ranks, rank)
        yield land_case(ranks, rank)
        yield add_case(ranks, rank)
    yield push_case(4, "i32", is_way_back=True)
    yield from metadata_cases()
    yield land_case(4, "i32", has_metadata=False)


def channels(ranks: int, rank: Any) -> dict[str, Any]:
    """Counts are told by one program, rows by all."""
    tiles = {"counts_channel": Tiles(ranks, 1, 1, 1, ranks), "rows_channel": Tiles(ranks * PROGRAMS, 1, 1, 1, ranks)}
    return {name: channel_kind(TileChannel(each), rank) for name, each in tiles.items()}


def push_case(ranks: int, rank: Any, is_way_back: bool = False) -> Case:
    """It waits for nothing: peers have a place for all that it may send."""
    known: dict[str, Any] = channels(ranks, rank)
    known |= {"counts": tensor_kind(ranks + 1, kind="*i32"), "staging": tensor_kind(SIZES.words, kind="*i32")}
    known["meta_staging"] = tensor_kind(SIZES.metadata, kind="*i32")
    known["source"] = SentRows("*i32", "*i32", "*i32", "*i32")
    absent: dict[str, Any] = {}
    if is_way_back:
        absent = dict.fromkeys(("counts_channel", "counts", "meta_staging", "own_counts"))
        known["source"] = SentRows("*i32", None, None, "*i32")
    known = {name: kind for name, kind in known.items() if name not in absent}
    numbers = {"bounds": BOUNDS} | ({} if is_way_back else {"own_counts": "*i32"})
    announced: tuple[Guard, ...] = (Guard("*rows_channel.peers", ("*staging.addresses",)),)
    if not is_way_back:
        announced += (Guard("*counts_channel.peers", ("*counts.addresses",), optional=True),)
    contract = Contract(releases=1 if is_way_back else ranks, unrolls=(ranks - 1,), announced=announced)
    return _case(
        push_rows_kernel,
        known | numbers,
        absent | {"sizes": replace(ALONE, pushes_counts=False) if is_way_back else SIZES},
        ranks,
        contract,
    )


def land_case(ranks: int, rank: Any, has_metadata: bool = True) -> Case:
    """It waits for all counts, then for the rows of each peer."""
    known: dict[str, Any] = channels(ranks, rank)
    known |= {"counts": tensor_kind(ranks + 1, kind="*i32"), "staging": tensor_kind(SIZES.words, kind="*i32")}
    known["source"] = SentRows("*i32", "*i32" if has_metadata else None, "*i32", "*i32")
    known |= dict.fromkeys(("own_counts", "out", "received"), "*i32") | {"bounds": BOUNDS}
    metadata = {"meta_staging": tensor_kind(SIZES.metadata, kind="*i32"), "meta_out": "*i32"}
    absent: dict[str, Any] = (
        {"sizes": replace(SIZES, step_rows=4)}
        if has_metadata
        else {"sizes": replace(ALONE, step_rows=4), **dict.fromkeys(metadata)}
    )
    guarded = (
        Guard("counts_channel.signals", ("counts.own",), optional=True),
        Guard("rows_channel.signals", ("staging.own",), optional=True),
    )
    contract = Contract(
        waits=2, looks=2, unrolls=(ranks - 1, ranks), guarded=guarded, alarm=alarm_of("counts_channel", "rows_channel")
    )
    return _case(land_rows_kernel, known | (metadata if has_metadata else {}), absent, ranks, contract)


def add_case(ranks: int, rank: Any) -> Case:
    """It waits for the parts of all peers."""
    known: dict[str, Any] = {"rows_channel": channels(ranks, rank)["rows_channel"]}
    known |= {
        "staging": tensor_kind(SIZES.words, kind="*i32"),
        "parts": "*bf16",
        "positions": "*i32",
        "received": "*i32",
    }
    known |= {"y": "*bf16", "tokens": "i32", "bounds": BOUNDS}
    guarded = (Guard("rows_channel.signals", ("staging.own",), optional=True),)
    contract = Contract(waits=1, looks=1, unrolls=(ranks - 1,), guarded=guarded, alarm=alarm_of("rows_channel"))
    constants = {"WIDTH": 2 * SIZES.words, "BLOCK": 1024}
    return _case(add_rows_kernel, known, constants, ranks, contract)


def metadata_cases() -> Iterator[Case]:
    """Metadata of tokens, which waits for nobody: with scales of rows in fp8, and without."""
    ids, floats = torch.zeros(16, dtype=torch.int32), torch.zeros(16)
    for top, scales in ((8, 56), (6, 0)):
        form = travelling.MetadataShape(top, 8, scales, 64 if scales else 1, 2 * top + scales + (4 if scales else 0))
        of_scales, label = floats if scales else None, f"top {top}, {scales} scales"
        arguments: list[Any] = [ids.long(), floats.bfloat16(), of_scales, ids, ids, SOME, 256, 32, 8, *form, 64]
        yield case_of(KernelCall(choose_ranks_kernel, arguments, {}, 1), label)
        arguments = [ids, ids, floats, of_scales, SOME, 32, 64, *form, 64]
        yield case_of(KernelCall(read_metadata_kernel, arguments, {}, 1), label)
        arguments = [ids, ids, ids, ids, ids, ids, ids, SOME, 8, top, 8, 16, 512]
        yield case_of(KernelCall(place_rows_kernel, arguments, {}, 1), label)


def _case(kernel: Any, kinds: dict[str, Any], constants: dict[str, Any], ranks: int, contract: Contract) -> Case:
    names = (argument for argument in kernel.arg_names if argument in kinds)
    launch = {"num_warps": WARPS[kernel.__name__]}
    return Case(
        source_of_kinds(kernel, {name: kinds[name] for name in names}, constants, ranks, launch=launch), contract
    )
