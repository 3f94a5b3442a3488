"""PTX text becomes functions, blocks, loops and origins."""

from __future__ import annotations

import pytest

from overweave.errors import MachineError
from tools.ptx_lint.flow import Flow
from tools.ptx_lint.graph import NOTHING, Graph, Spread, facts_before
from tools.ptx_lint.ptx import Function, parse, registers

HEAD = ".visible .entry f(\n .param .u64 .ptr .global f_param_0,\n .param .u64 f_param_1\n)\n.reqntid 128\n{\n"


def function(body: str) -> Function:
    (found,) = parse(f"{HEAD}{body}\n}}\n")
    return found


def test_parts_of_an_instruction() -> None:
    (item, _) = function("@!%p1 ld.acquire.sys.global.v2.u32 {%r1, %r2}, [%rd1+16];\nret;").instructions
    assert item.predicate == ("%p1", True)
    assert item.parts == ("ld", "acquire", "sys", "global", "v2", "u32")
    assert item.operands == ("{%r1, %r2}", "[%rd1+16]")
    assert (item.writes, item.reads, item.line) == (("%r1", "%r2"), ("%rd1",), 7)


def test_header_and_source_lines() -> None:
    text = f'{HEAD}.loc 1 42 7 // kernel.py:42\nret; // done\n}}\n.file 1 "/src/kernel.py"\n'
    (found,) = parse(text)
    assert (found.parameters, found.threads) == (("f_param_0", "f_param_1"), 128)
    assert found.instructions[0].source == "kernel.py:42"


def test_labels_of_inline_assembly_stay_in_their_braces() -> None:
    spin = "{ .reg .pred p; spin: ld.acquire.sys.global.u32 %r1, [%rd1]; setp.lt.s32 p, %r1, 1; @p bra spin; }\n"
    graph = Graph(function(spin + spin + "ret;"))
    assert len(graph.loops) == 2
    assert not graph.loops[0].blocks & graph.loops[1].blocks
    assert len({item.predicate for item in graph.function.instructions if item.predicate}) == 2


def test_numbers_and_special_registers_are_no_registers() -> None:
    assert registers("{%r1, 0f3F800000, 0x10, %tid.x, _}") == ("%r1",)


@pytest.mark.parametrize("text", ["", "int main() { return 0; }", f"{HEAD}ret;", f"{HEAD}bra nowhere;\n}}"])
def test_what_is_no_kernel_is_refused(text: str) -> None:
    with pytest.raises(MachineError):
        parse(text)


DISPATCH = """
@%p1 bra first;
again: bar.sync 1;
ld.shared.b32 %r1, [%r9];
$L_brx_0: .branchtargets second, third, done;
brx.idx %r1, $L_brx_0;
second: bar.sync 2, 96;
bra again;
third: bar.warp.sync -1;
bra again;
first: bar.sync 0, 128;
done: ret;
"""


def test_partitions_of_a_specialised_kernel_never_become_one_another() -> None:
    graph = Graph(function(DISPATCH))
    first, second, third = (
        next(item for item in graph.function.instructions if item.operands == operands)
        for operands in (("0", "128"), ("2", "96"), ("-1",))
    )
    regions = [graph.partition_of(item) for item in (first, second, third)]
    assert len(set(regions)) == 3
    assert None not in regions
    assert graph.loops == ()
    assert graph.partition_of(graph.function.instructions[0]) is None


NEST = """
mov.u32 %r1, 0;
outer: add.s32 %r1, %r1, 1;
inner: add.s32 %r2, %r2, 1;
@%p1 bra inner;
@%p2 bra outer;
ret;
"""


def test_loops_nest_and_dominate() -> None:
    graph = Graph(function(NEST))
    outer, inner = graph.loops
    assert inner.blocks < outer.blocks
    assert graph.innermost(inner.header) == inner
    assert outer.header in graph.dominators[inner.header]
    assert inner.header in graph.postdominators[outer.header]


def test_facts_follow_every_path() -> None:
    graph = Graph(function("@%p1 bra over;\nadd.s32 %r1, %r1, 1;\nover: ret;"))
    add = graph.function.instructions[1]
    facts = facts_before(graph, Spread(lambda item, had: NOTHING if item == add else had, frozenset(("owed",))))
    assert facts[2] == {"owed"}
    straight = Graph(function("add.s32 %r1, %r1, 1;\nret;"))
    facts = facts_before(straight, Spread(lambda item, had: NOTHING if item.index == 0 else had, frozenset(("owed",))))
    assert facts[1] == NOTHING


def test_decision_around_a_block() -> None:
    graph = Graph(function("@%p1 bra over;\nadd.s32 %r1, %r1, 1;\nover: ret;"))
    ((edge,),) = (graph.branches_around(block) for block in (1,))
    assert (edge.source, edge.taken) == (0, True)
    assert graph.branches_around(2) == ()


FLOW = """
ld.param.b64 %rd1, [f_param_0];
mul.wide.s32 %rd2, %r1, 4;
add.s64 %rd3, %rd1, %rd2;
ld.global.b64 %rd4, [%rd3];
mov.u64 %rd5, %globaltimer;
setp.lt.u64 %p1, %rd5, %rd4;
@%p1 st.global.u32 [%rd4], %r1;
ret;
"""


def test_origins_of_pointers_tables_and_conditions() -> None:
    graph = Graph(function(FLOW))
    flow = Flow(graph, {0: "table"})
    load, store = flow.accesses
    assert (load.kind, load.pointers) == ("load", {"table"})
    assert (store.kind, store.pointers) == ("store", {"*table"})
    assert {"timer:4", "read:3"} <= flow.of_predicate(store.instruction)


def test_a_value_broadcast_through_shared_memory_keeps_its_origin() -> None:
    body = "ld.acquire.sys.global.u32 %r1, [%rd1];\nst.shared.u32 [%r9], %r1;\nld.shared.u32 %r2, [%r9];\n"
    graph = Graph(function(body + "setp.ge.s32 %p1, %r2, 0;\n@%p1 bra over;\nover: ret;"))
    branch = graph.function.instructions[4]
    assert "read:0" in Flow(graph, {}).of_predicate(branch)
