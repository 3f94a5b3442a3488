"""The rules, on kept PTX: right kernels pass, every planted violation is found by the rule it breaks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from tests.compiler.cases import KEPT, REDUCES, edit, rules
from tests.compiler.seeds import SEEDS, SLOT_LOAD, SLOTS, Seed
from tools.aot import Compiled, Resources
from tools.ptx_lint.contract import Contract, Finding, Guard
from tools.ptx_lint.lint import lint

GOLDEN = Path(__file__).parents[2] / "golden" / "compiler"
POINTERS = {
    "matmul_waits": {0: "a_desc", 5: "b_desc", 10: "y", 11: "signals", 12: "abort", 13: "claims"},
    "matmul_stores": {0: "a_desc", 5: "b_desc", 10: "y", 11: "y_desc", 16: "signals"},
    "matmul_bulk": {0: "a_desc", 5: "b_desc", 10: "y", 11: "y_desc", 16: "signals"},
    "reduce_waits": {0: "slots", 1: "own", 2: "y", 3: "signals", 4: "abort"},
    "begin": {0: "own_pad", 1: "peer_credits", 2: "own_credits", 3: "abort"},
    "sounds": {0: "slots", 1: "y", 2: "signals", 3: "words", 4: "limits"},
}
FITS = Resources(registers=64, spill_bytes=0, stack_bytes=0, shared_bytes=49176, num_warps=4)


@cache
def kept(name: str) -> Compiled:
    return Compiled(KEPT[name][0].name, name, (GOLDEN / f"{name}.ptx").read_text(), b"", POINTERS[name], FITS)


def lint_kept(name: str, *changes: tuple[str, str] | tuple[str, str, int]) -> tuple[Finding, ...]:
    kernel = kept(name)
    return lint(replace(kernel, ptx=edit(kernel.ptx, *changes)), KEPT[name][1])


@pytest.mark.parametrize("name", KEPT)
def test_right_kernel_passes(name: str) -> None:
    assert lint_kept(name) == ()


@pytest.mark.parametrize("seed", SEEDS, ids=[f"{seed.rule}: {seed.fault}" for seed in SEEDS])
def test_seeded_violation_is_found(seed: Seed) -> None:
    assert seed.rule in rules(lint_kept(seed.kernel, *seed.changes))


def test_every_rule_has_two_seeds() -> None:
    found = [seed.rule for seed in SEEDS]
    assert {rule for rule in found if found.count(rule) < 2} == set()


@pytest.mark.parametrize("lost", [{"spill_bytes": 16}, {"stack_bytes": 48}])
def test_spills_are_found(lost: dict[str, int]) -> None:
    spilled = replace(kept("reduce_waits"), resources=replace(FITS, **lost))
    assert rules(lint(spilled, REDUCES)) == {"spills"}


def test_serialized_wgmma_is_found() -> None:
    warned = replace(kept("matmul_waits"), resources=replace(FITS, warnings=("(C7510) wgmma.mma_async is serialized",)))
    assert rules(lint(warned, KEPT["matmul_waits"][1])) == {"wgmma"}


def test_finding_names_place_fault_and_cure() -> None:
    (finding,) = lint_kept("matmul_stores", (r"sys\.release", "gpu.release"))
    line = kept("matmul_stores").ptx.splitlines()[finding.line - 1]
    assert "release.add" in line
    assert str(finding).startswith(f"matmul_notifies [matmul_stores] system-scope at ptx:{finding.line}: ")
    assert finding.cure


def test_same_fault_in_many_places_is_one_finding() -> None:
    (finding,) = (f for f in lint_kept("reduce_waits", (r"(mov\.u32 v, 1;\n)", r"@%p1 bra fence;\n\1"),
                  (r"(fence\.proxy)", r"fence: \1")) if f.rule == "guarded-order")  # fmt: skip
    assert "more places" in finding.what


def test_looks_are_declared() -> None:
    look = (r"ret;", "ld.acquire.sys.global.u32 %r1, [%rd1];\nret;")
    assert rules(lint_kept("reduce_waits", look)) == {"wait-loop"}
    kernel = replace(kept("reduce_waits"), ptx=edit(kept("reduce_waits").ptx, look))
    assert lint(kernel, replace(REDUCES, looks=1)) == ()


def test_optional_wait_may_be_passed_by_but_not_its_data() -> None:
    around = (r"(mov\.u32 v, 1;\n)", r"@%p1 bra fence;\n\1"), (r"(fence\.proxy)", r"fence: \1")
    contract = replace(REDUCES, guarded=(Guard("signals", ("slots",), optional=True),))
    kernel = kept("reduce_waits")
    assert lint(replace(kernel, ptx=edit(kernel.ptx, *around)), contract) == ()
    hoisted = (r"(@%p1 bra fence;\n)", SLOTS + SLOT_LOAD + r"\1")
    early = edit(kernel.ptx, *around, hoisted)
    assert "guarded-order" in rules(lint(replace(kernel, ptx=early), contract))


def test_unrolled_waits_are_counted_in_copies() -> None:
    contract = replace(KEPT["begin"][1], unrolls=())
    assert rules(lint(kept("begin"), contract)) == {"declared-counts"}


def test_unknown_argument_in_contract_is_refused() -> None:
    with pytest.raises(InputError, match="gathered"):
        lint(kept("reduce_waits"), Contract(guarded=(Guard("signals", ("gathered",)),)))
