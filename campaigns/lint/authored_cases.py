"""Every annotated kernel of examples/kernels, fused in every way, as the compiler and the lint are given them.

Signatures are what a launch specialises for: tensors at multiples of 16 bytes, sizes divisible by 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from campaigns.lint.lint_case import Case
from overweave.compiler.emit.emit import PARAMETERS, load_generated, parameters_of
from overweave.compiler.emit.fuse import fusion_options
from overweave.errors import ScheduleError
from overweave.ops.author.compile import FusedKernel, compile
from tools.aot import Source
from tools.ptx_lint.contract import contract_of

KERNELS = Path(__file__).parents[2] / "examples" / "kernels"
GATHERS = ("all_gather.push pieces=2", "all_gather.pull", "all_gather.collective")
BY_KERNEL = ("all_gather.push mover=copy_kernel", "all_gather.push mover=bulk_kernel")
BY_TILES = ("all_gather.push mover=tiles", "all_gather.push mover=bulk_tiles")
PUSHED_BEHIND = (
    "reduce_scatter.scatter mover=bulk_kernel",
    "reduce_scatter.mesh mover=copy_kernel",
    "reduce_scatter.islands mover=tiles",
)
AT_PEERS = ("reduce_scatter.scatter mover=tiles pieces=2", "all_to_all.send mover=tiles", "spread.push mover=tiles")
SPREADS = (
    "spread.push",
    "spread.push pieces=4",
    "spread.collective",
    "spread.push mover=copy_kernel",
    "spread.push mover=bulk_kernel",
    AT_PEERS[2],
)
SCATTERS = (
    "reduce_scatter.scatter pieces=2",
    "reduce_scatter.ring",
    "reduce_scatter.collective",
    "reduce_scatter.waves",
)
CHUNKED_SUMS = (
    "reduce_scatter.mesh pieces=1",
    "reduce_scatter.double_ring",
    "reduce_scatter.islands",
    "all_reduce.mesh",
    "all_reduce.ring",
)
PROTOCOL = dict(zip(PARAMETERS, ("*i32",) * 4 + ("*i64",) + ("i32",) * 3, strict=True))
WORLD_SIZE = 4


class Author(NamedTuple):
    """A kernel of the examples. numbers: a call's integers; constants: of the numbers, and other constexprs.

    types: of the other parameters, by name. depth: matmul groups in flight in the main loop, 0 for no tensor cores.
    """

    name: str
    numbers: Mapping[str, int]
    constants: Mapping[str, Any]
    types: Mapping[str, str]
    exchanges: tuple[Mapping[str, str], ...]
    depth: int
    options: Mapping[str, int]


_BLOCKS = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}
_STRIDES = ("stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", "stride_cn")
_LAUNCH = {"num_warps": 8, "num_stages": 3}
_MATMULS = (
    *({"A": how} for how in GATHERS),
    *({"C": how} for how in SCATTERS),
    *({"A": how} for how in BY_TILES),
    {"A": GATHERS[0], "C": SCATTERS[0]},
    {"A": BY_TILES[0], "C": SCATTERS[0]},
    {"A": "all_to_all.receive", "C": "all_to_all.send"},
)
_STORED_AWAY = (
    {"C": AT_PEERS[0]},
    {"C": "all_reduce.two_shot mover=tiles"},
    {"A": BY_TILES[1], "C": AT_PEERS[0]},
    {"A": "all_to_all.receive mover=tiles", "C": AT_PEERS[1]},
)
_WEIGHTS = (
    {"B": GATHERS[0]},
    {"B": BY_TILES[0]},
    {"A": GATHERS[0], "B": GATHERS[1]},
)

AUTHORS: dict[str, Author] = {
    "matmul": Author(
        "matmul_kernel",
        {"M": 4096, "N": 2048, "K": 1024} | dict(zip(_STRIDES, (1024, 1, 2048, 1, 2048, 1), strict=True)),
        _BLOCKS | {"GROUP_M": 8} | dict.fromkeys(("stride_ak", "stride_bn", "stride_cn"), 1),
        dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*bf16"),
        (*_MATMULS, *_STORED_AWAY, *_WEIGHTS),
        1,
        _LAUNCH,
    ),
    "persistent": Author(
        "persistent_kernel",
        {"M": 4096, "N": 2048, "K": 1024},
        _BLOCKS | {"GROUP_M": 8, "NUM_SMS": 132},
        dict.fromkeys(("a_desc", "b_desc"), "tensordesc<bf16[128, 64]>") | {"c_desc": "tensordesc<bf16[128, 128]>"},
        _MATMULS,
        1,
        _LAUNCH,
    ),
    "gate_up": Author(
        "gate_up_kernel",
        {"M": 4096, "N": 2048, "K": 1024},
        _BLOCKS,
        dict.fromkeys(("x", "gate", "up", "out"), "*bf16"),
        tuple({"X": how} for how in (*GATHERS, *BY_TILES)),
        1,
        _LAUNCH,
    ),
    "batched": Author(
        "batched_kernel",
        {"Z": 16, "M": 1024, "N": 2048, "K": 1024},
        _BLOCKS,
        dict.fromkeys(("a", "b", "c"), "*bf16"),
        tuple({"A": how} for how in (*GATHERS, *BY_TILES)),
        1,
        _LAUNCH,
    ),
    "norm": Author(
        "rms_norm_kernel",
        {"ROWS": 1024, "COLS": 4096},
        {"BLOCK": 4096},
        dict.fromkeys(("x", "residual", "weight", "out"), "*bf16") | {"eps": "fp32"},
        ({"OUT": "spread.push"}, {"OUT": "spread.push pieces=4"}, {"OUT": AT_PEERS[2]}, {"OUT": "spread.collective"}),
        0,
        {"num_warps": 8},
    ),
    "layer_norm": Author(
        "layer_norm_kernel",
        {"row_stride": 4096, "M": 1024, "N": 4096},
        {"BLOCK_SIZE": 1024},
        dict.fromkeys(("x_ptr", "y_ptr", "weight_ptr", "bias_ptr"), "*bf16")
        | dict.fromkeys(("mean_ptr", "rstd_ptr"), "*fp32")
        | {"eps": "fp32"},
        (*({"X": how} for how in (*GATHERS, *BY_TILES)), {"Y": "spread.push pieces=2"}, {"Y": AT_PEERS[2]}),
        0,
        {"num_warps": 8},
    ),
    "attention": Author(
        "attention_kernel",
        {"Q": 1024, "S": 4096, "H": 16, "q_start": 1024},
        {"D": 128, "BLOCK_Q": 128, "BLOCK_S": 64, "CAUSAL": True},
        dict.fromkeys(("q", "k", "v", "out"), "*bf16") | {"scale": "fp32"},
        tuple({"K": how, "V": how} for how in (*GATHERS, *BY_TILES)),
        0,
        _LAUNCH,
    ),
}


def authored_case(folder: Path, file: str, author: Author, wanted: Mapping[str, str]) -> Case:
    """A kernel with its exchanges: compiled from the text that a call would run."""
    fused: FusedKernel = compile(f"{KERNELS / file}.py:{author.name}", wanted)
    numbers = {**author.numbers, **{name: value for name, value in author.constants.items() if type(value) is int}}
    space, plan = fused.kernel.space(numbers), fused.plan(numbers, WORLD_SIZE, rank=0)
    options = fusion_options(plan, space, fused.schedules)
    if options != fused.fusion_options():
        raise ScheduleError(f"fuse {author.name}", "its plan asks for other waits than its schedules", "Report this")
    function = load_generated(folder, author.name, fused.source())
    integers = {name: "i32" for name in author.numbers if name not in author.constants}
    own = {
        name: kind for name, kind in author.types.items() if f"overweave_{name}" in parameters_of(fused.kernel, options)
    }
    arrived = {f"overweave_{name}": kind for name, kind in own.items()}
    placed = {"overweave_places": "*i64"} if options.stored_at_peers else {}
    carrying = {"overweave_targets": "*i64", "overweave_slices": "i32"} if options.push_path else {}
    signature = {**author.types, **integers, **arrived, **PROTOCOL, **carrying, **placed}
    divisible = [name for name in integers if author.numbers[name] % 16 == 0]
    aligned = dict.fromkeys((*(name for name, kind in signature.items() if kind.startswith("*")), *divisible), 16)
    config = " ".join(f"{tensor}={how}" for tensor, how in wanted.items())
    source = Source(function, signature, dict(author.constants), aligned, author.options, config)
    return Case(source, contract_of(fused.kernel, options, author.depth))
