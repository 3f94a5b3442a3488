from __future__ import annotations

import json

import pytest

from overweave.errors import InputError
from overweave.ir.operators.registry import OPERATORS
from overweave.tuner.space import shapes
from overweave.tuner.space.shapes import ShapeCase, read_shapes, set_names, usual_set
from tests.source_tree import ROOT

FOLDER = ROOT / "benchmarks" / "shapes"
PUBLISHED = {"mlp": 6, "gpt3": 6, "llm_layers": 120}
OF_ALL_REDUCE = {"llm_layers": 32}


@pytest.mark.parametrize("operator", [name for name, record in OPERATORS.items() if not record.exchanges])
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_sets_of_every_operator(name, operator):
    shapes = read_shapes(name, operator)
    own = OF_ALL_REDUCE if operator == "matmul_all_reduce" else {}
    assert len(shapes.cases) == own.get(name, PUBLISHED[name])
    assert shapes.operator == operator
    assert shapes.source
    assert shapes.note


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_has_a_usual_set(operator):
    assert read_shapes(usual_set(operator), operator).operator == operator


@pytest.mark.parametrize(
    "path", sorted({*FOLDER.glob("*.json")} - {*FOLDER.glob("*.block.json")}), ids=lambda path: path.stem
)
def test_every_file_names_its_operator_and_its_source(path):
    content = json.loads(path.read_text())
    assert content["operator"]
    assert content["source"]
    names = [case["name"] for case in content["cases"]]
    assert len(set(names)) == len(names) > 0
    if content["operator"] in OPERATORS:
        assert path.name.endswith(f".{content['operator']}.json")
        assert path.name.split(".")[0] in set_names(content["operator"])
        assert read_shapes(str(path), content["operator"]).cases


def test_global_sizes_of_a_known_layer():
    """LLaMA-3.1-8B: 8192 rows, hidden 4096, intermediate 14336."""
    assert read_shapes("mlp", "all_gather_matmul").cases[1] == ShapeCase("MLP-2", 8192, 14336, 4096)
    assert read_shapes("mlp", "matmul_reduce_scatter").cases[1] == ShapeCase("MLP-2", 8192, 4096, 14336)
    gpt3 = read_shapes("gpt3", "all_gather_matmul").cases[3]
    assert (gpt3.m, gpt3.n, gpt3.k) == (2048, 49152, 12288)


GOOD = {"cases": [{"name": "a", "m": 1, "n": 2, "k": 3}]}
BAD = {
    "not json": "{",
    "no cases": json.dumps({"cases": []}),
    "unknown key": json.dumps(GOOD | {"extra": 1}),
    "unknown key in a case": json.dumps({"cases": [GOOD["cases"][0] | {"M": 1}]}),
    "text for a number": json.dumps({"cases": [GOOD["cases"][0] | {"m": "1"}]}),
    "negative": json.dumps({"cases": [GOOD["cases"][0] | {"m": -1}]}),
    "too large": json.dumps({"cases": [GOOD["cases"][0] | {"k": 2**40}]}),
    "two of one name": json.dumps({"cases": GOOD["cases"] * 2}),
    "another operator": json.dumps(GOOD | {"operator": "ring_attention"}),
    "deep": '{"cases": ' + "[" * 100_000,
    "columns that are not n": json.dumps({"cases": [GOOD["cases"][0] | {"columns": [1, 2]}]}),
    "not text": b'{"note": "\xff"}',
    "long": json.dumps(GOOD | {"note": "x" * (1 << 20)}),
}


def test_weights_and_endings_are_part_of_a_case():
    cases = {case.name: case for case in read_shapes("weights", "all_gather_matmul").cases}
    three = cases["Llama-3-8B.qkv.m=8192"].problem("all_gather_matmul", 4, "bf16")
    assert (three.n, three.columns) == (1536, (1024, 256, 256))
    gated = cases["Llama-3-8B.gate_up.m=2048"].problem("all_gather_matmul", 4, "bf16")
    assert (gated.n, gated.multiplied_columns, gated.epilogue.activation) == (3584, 7168, "silu")


def test_a_file_of_the_plain_form(tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps(GOOD))
    assert read_shapes(str(path), "all_gather_matmul").cases == (ShapeCase("a", 1, 2, 3),)


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_by_name(name, tmp_path):
    path = tmp_path / "bad.json"
    content = BAD[name]
    path.write_bytes(content if isinstance(content, bytes) else str(content).encode())
    with pytest.raises(InputError, match=r"bad\.json|share the name"):
        read_shapes(str(path), "all_gather_matmul")


def test_an_unknown_set_lists_the_known_ones():
    with pytest.raises(InputError, match="mlp"):
        read_shapes("no_such_set", "all_gather_matmul")


def test_where_no_clone_is_the_sets_are_said_to_lie_in_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shapes, "_folders", lambda: (shapes.SETS,))
    with pytest.raises(InputError, match="work in a clone, whose benchmarks/shapes holds sets"):
        read_shapes("mlp", "all_gather_matmul")
