"""What cannot be lowered is refused in one line: the place in the input, what was found, what to do."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from campaigns.choices.joined_machines import joined_by, mesh
from overweave.errors import InputError, MachineFileError
from overweave.lower import (
    AttentionOp,
    MatmulOp,
    Nest,
    RankMesh,
    buffer,
    loop,
    loops,
    parallelize,
    placements,
    shard,
    shift,
)
from overweave.lower.layouts import mesh_of, placements_of

ALONE = joined_by("levels", [(0, 1), (1, 2)], 4)
OP, SEQUENCE = MatmulOp(24, 24, 24, "float32"), AttentionOp(2, 4, 24, 2)
PLACED: dict[str, tuple[dict[str, Any], str]] = {
    "shard": ({"inputs": {"x": "S2", "w": "R"}}, r"inputs\[x\]=S2: a shard of dimension 2 of 2. Use 0 to 1"),
    "axes": ({"inputs": {"x": ["S0", "R"], "w": "R"}}, r"inputs\[x\]=.*: 2 placements on a mesh of 1 dimensions"),
    "outputs": ({"outputs": ["R", "R"]}, r"outputs=.*: 2 placements on a mesh of 1 dimensions"),
    "maximum": ({"inputs": {"x": Partial("max"), "w": "R"}}, r"inputs\[x\]=P\(max\): a partial max. Use Partial\(\)"),
    "word": ({"inputs": {"x": "sharded", "w": "R"}}, r"inputs\[x\]=sharded: placement 'sharded'"),
    "both partial": (
        {"inputs": {"x": "P", "w": "P"}},
        r"inputs\[x\] and inputs\[w\], mesh dimension 0: both are partial",
    ),
    "partial and sharded": ({"inputs": {"x": "P", "w": "S0"}}, r"mesh dimension 0: one is a partial sum, the other"),
    "tensors": ({"inputs": {"x": "R"}}, r"inputs of a MatmulOp: those of x. Give x, w"),
    "one rank": ({"mesh": 1}, r"mesh 1: it has one rank, and nothing travels. Call the matmul"),
    "three dimensions": ({"mesh": (2, 2, 2)}, r"mesh 2x2x2: 3 dimensions"),
    "path": ({"path": "magic"}, r"path='magic': unknown. Use one of direct, template, synth"),
    "size": ({"op": MatmulOp(24, 0, 24)}, r"MatmulOp with n=0: no such size"),
    "slices": ({"op": MatmulOp(24, 24, 24, slices=(2, 0))}, r"slices=\(2, 0\): not two numbers"),
    "nothing to multiply": (
        {"op": MatmulOp(24, 24, 1), "inputs": {"x": "S1", "w": "S0"}, "outputs": "P"},
        r"k=1 on 2 ranks: rank 1 has nothing",
    ),
    "no mesh": ({"mesh": 2.0}, r"mesh: 2.0 is no shape. Give a number of ranks"),
    "no inputs": ({"inputs": None}, r"inputs of a MatmulOp: None. Give x, w"),
    "dtype": ({"op": MatmulOp(24, 24, 24, "int8")}, r"dtype='int8': no dtype of a matmul"),
    "one slice": ({"op": MatmulOp(24, 24, 24, slices=2)}, r"slices=2: not two numbers"),  # type: ignore[arg-type]
    "a rank without columns": (
        {"op": AttentionOp(1, 2, 8, 1), "inputs": {"q": "R", "k": "S2", "v": "S0"}, "outputs": "S0", "path": "direct"},
        r"path='direct' of an all_to_all: a rank has nothing to send, or to receive. Use path='template'",
    ),
    "slices of the library": (
        {
            "op": MatmulOp(24, 24, 24, slices=(3, 1)),
            "inputs": {"x": "S1", "w": "S0"},
            "outputs": "S0",
            "path": "direct",
        },
        r"path='direct' of matmul: .*out of bounds.*Use path='template'",
    ),
    "few GPUs": ({"mesh": RankMesh((9,), mesh())}, r"mesh 9: full_mesh8 has 8 GPUs"),
    "no such op": ({"op": "matmul"}, r"lower: a str. Give a lower.MatmulOp"),
    "partial attention": (
        {"op": SEQUENCE, "inputs": {"q": "P", "k": "R", "v": "R"}},
        r"placements of q: a partial sum. Reduce it before",
    ),
    "alone": (
        {
            "mesh": RankMesh((4,), joined_by("levels", [(0, 1), (1, 2)], 4)),
            "inputs": {"x": "S0", "w": "R"},
            "path": "synth",
        },
        r"no route from GPU 0 to GPU 3",
    ),
    "unequal columns": (
        {"op": MatmulOp(24, 25, 4096), "inputs": {"x": "S1", "w": "S0"}, "outputs": "S1", "path": "direct"},
        r"path='direct' of an \w+: shares of .* columns. Use path='template'",
    ),
}
NESTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "axis": ((parallelize("rows", 0),), r"word 0, parallelize.*: there is no axis rows. Name one of m, n, k"),
    "mesh": ((parallelize("m", 2),), r"word 0, .*: the mesh has no dimension 2. Use 0 to 1"),
    "overlap": ((parallelize("m", 0), parallelize("n", 0)), r"word 1, .*: mesh dimension 0 is taken by axis m"),
    "tensor": ((shard("z", m=0),), r"word 0, shard.*: there is no tensor z"),
    "twice": ((shard("x", m=0), shard("x", k=1)), r"word 1, .*: x lies somewhere already"),
    "other axis": ((shard("x", n=0),), r"word 0, .*: x has no axis n. Name one of m, k"),
    "two cuts": ((shard("x", m=0, k=0),), r"word 0, .*: mesh dimension 0 cuts two axes"),
    "trips": ((loop("k", 0),), r"word 0, loop.*: 0 trips"),
    "unequal trips": ((parallelize("m", 0), loop("m", block=4)), r"word 1, loop.*: ranks take 3 and 4 trips"),
    "empty blocks": ((loop("k", 30),), r"word 0, loop.*: 30 blocks of k leave some empty"),
    "an empty last block": ((loop("m", 5), loop("m", 4)), r"word 1, loop.*: 20 blocks of m leave some empty"),
    "both": ((loop("k", 2, block=12),), r"word 0, loop.*: both trips and a block. Give one of them"),
    "no number": ((loop("k", 2.0),), r"word 0, loop.*: a number of it is not whole"),  # type: ignore[arg-type]
    "no mesh dimension": ((parallelize("m", "0"),), r"word 0, .*: a number of it is not whole"),  # type: ignore[arg-type]
    "no loop": ((shift("k", 0),), r"word 0, shift.*: no loop of k stands above it"),
    "ranks": ((loop("k", 3), shift("k", 0)), r"word 1, shift.*: 3 trips over 2 ranks"),
    "far": ((loop("k", 2), shift("k", 0, by=2)), r"word 1, shift.*: blocks would come from ranks 2 away"),
    "result": ((buffer("y"),), r"word 0, buffer.*: it is read by no step"),
    "no word": (("loop",), r"word 0, str\(\): no word of a nest"),
    "no neighbour": (
        (shard("w", k=0), parallelize("n", 0), loop("k", 2), shift("k", 0), buffer("x"), buffer("w"), shard("x", k=1)),
        r"buffer\('\w'\) in a loop: no neighbour of rank",
    ),
}


@pytest.mark.parametrize("name", PLACED)
def test_placements_are_refused(name: str):
    asked, message = PLACED[name]
    known: dict[str, Any] = {"op": OP, "inputs": {"x": "R", "w": "R"}, "outputs": "R", "mesh": 2}
    given = known | asked
    with pytest.raises((InputError, MachineFileError), match=message) as refused:
        placements(given.pop("op"), **given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", NESTS)
def test_nests_are_refused(name: str):
    words, message = NESTS[name]
    with pytest.raises(InputError, match=message) as refused:
        loops(Nest(MatmulOp(25, 24, 24, "float32"), words), mesh=(2, 2))
    assert "\n" not in str(refused.value)


def test_what_is_no_nest_is_refused():
    for nest in (None, Nest(OP, parallelize("m", 0))):  # type: ignore[arg-type]
        with pytest.raises(InputError, match="is no nest"):
            loops(nest, mesh=2)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="rank 1 has nothing to multiply"):
        loops(Nest(MatmulOp(8, 8, 1), (parallelize("k", 0), shard("y", m=0))), mesh=2)


def test_softmax_is_of_all_keys():
    with pytest.raises(InputError, match=r"parallelize\('kv', 0\): softmax is of all keys. Walk kv in a loop"):
        loops(Nest(SEQUENCE, (parallelize("kv", 0),)), mesh=2)


def test_the_words_of_three_compilers_are_read():
    mesh = mesh_of((2, 4))
    assert placements_of("x", (Shard(0), Replicate()), mesh, 2) == ("S0", "R")
    assert placements_of("x", [Partial(), Shard(-1)], mesh, 2) == ("P", "S1")
    assert placements_of("x", ["Shard(1)", "Replicate()"], mesh, 2) == ("S1", "R")
    assert placements_of("x", "S01R", mesh, 2) == ("S0", "S0")
    assert placements_of("x", "S1S0", mesh, 2) == ("S1", "S0")
    assert placements_of("x", "{replicated}", mesh, 2) == ("R", "R")
    assert placements_of("x", "{devices=[8,1]<=[8]}", mesh, 2) == ("S0", "S0")
    assert placements_of("x", "{devices=[2,4]0,1,2,3,4,5,6,7}", mesh, 2) == ("S0", "S1")
    assert placements_of("x", "{devices=[4,2]<=[2,4]T(1,0)}", mesh, 2) == ("S1", "S0")
    assert placements_of("x", "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}", mesh, 2) == ("R", "S1")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{devices=[3,1]<=[3]}", "Name each rank of the mesh once"),
        ("{devices=[4,2]<=[8]}", "do not follow the dimensions of mesh"),
        ("{manual}", "no sharding that can be read"),
        ("{devices=[8,1]<=[2,4]T(5,0)}", "Name each rank of the mesh once"),
        ("{devices=[,]<=[8]}", "no sharding that can be read"),
        ("S2R", "mesh dimension 2 of 2"),
        ("S0S0", "mesh dimension 0 cuts it twice"),
        ("S10R", "a later mesh dimension cuts first"),
    ],
)
def test_shardings_that_are_none_are_refused(written: str, message: str):
    with pytest.raises(InputError, match=message):
        placements_of("x", written, mesh_of((2, 4)), 2)
