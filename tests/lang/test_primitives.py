"""The tile primitives run between interpreted ranks, compile for Hopper, and the lint sees what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from overweave.lang.arguments import Channel, SymmetricLayout, SymmetricTensor, folded
from overweave.lang.mapping import TileChannel, Tiles
from tests import forked
from tests.lang import primitive_kernels as kernels
from tools.aot import Source, compile_kernel
from tools.ptx_lint.contract import Contract, Guard
from tools.ptx_lint.lint import lint

pytestmark = pytest.mark.slow

CHANNEL = TileChannel(Tiles(4096, 256, 16, 64, 4), Tiles(4096, 256, 32, 64, 4), channels=4, has_peers=True)
ALARM = ("channel.words", "*channel.limits")


@pytest.mark.parametrize("part", ["1/4", *(pytest.param(f"{k}/4", marks=pytest.mark.nightly) for k in range(2, 5))])
def test_primitives_between_processes(part: str):
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--part={part}"]
    command += ["tests/lang/interpreted_primitives.py", "tests/lang/interpreted_programs.py"]
    cases = forked.run(*command, timeout=290)
    assert cases.returncode == 0, cases.stdout[-4000:] + cases.stderr[-2000:]


def channel(rank: Any = "i32", table: str | None = None, layout: TileChannel = CHANNEL) -> Channel:
    """A channel's types; rank 1 is a constant, as a launch makes it."""
    return Channel("*i32", "*i64", "*i32", "*i64", table, table, table, rank, "i32", folded(layout))


def findings(kernel: Any, signature: dict[str, Any], constants: dict[str, int], contract: Contract) -> set[str]:
    tensor = SymmetricTensor("*bf16", "*i64", folded(SymmetricLayout(256, False)))
    types = {name: tensor if kind == "tensor" else kind for name, kind in signature.items()}
    compiled = compile_kernel(Source(kernel, types, constants, {}, {"num_warps": 8}, "test"))
    return {finding.rule for finding in lint(compiled, contract)}


GATHER = {"whole": "tensor", "x": "*bf16", "out": "*bf16"}
GATHERED = Contract(
    waits=1,
    looks=1,
    releases=1,
    unrolls=(4,),
    guarded=(Guard("channel.signals", ("whole.own",), optional=True),),
    announced=(Guard("*channel.peers", ("*whole.addresses",)),),
    alarm=ALARM,
)


@pytest.mark.parametrize("rank", ["i32", 1])
@pytest.mark.parametrize("table", [None, "*i32"])
def test_gather_compiles_and_keeps_its_contract(rank: Any, table: str | None):
    constants = {"ROWS": 4096, "COLS": 256, "FAULT": 0}
    assert not findings(kernels.gather_kernel, {"channel": channel(rank, table), **GATHER}, constants, GATHERED)


def test_the_lint_misses_a_notify_that_is_dropped():
    constants = {"ROWS": 4096, "COLS": 256, "FAULT": 1}
    found = findings(kernels.gather_kernel, {"channel": channel(), **GATHER}, constants, GATHERED)
    assert {"declared-counts", "announced-order"} <= found


def test_relay_compiles_and_keeps_its_contract():
    contract = Contract(
        waits=1,
        looks=1,
        releases=1,
        guarded=(Guard("channel.signals", (), optional=True),),
        announced=(Guard("*channel.peers", (), optional=True),),
        alarm=ALARM,
    )
    assert not findings(kernels.relay_kernel, {"channel": channel(), "tensor": "tensor"}, {"FAULT": 0}, contract)


def test_peers_need_signals_of_their_own():
    layout = TileChannel(CHANNEL.tiles)
    with pytest.raises(Exception, match="peer_tile_wait"):
        findings(
            kernels.relay_kernel, {"channel": channel(layout=layout), "tensor": "tensor"}, {"FAULT": 0}, Contract()
        )
