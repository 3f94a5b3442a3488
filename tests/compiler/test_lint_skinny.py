"""The matmul of few rows as it is compiled: clean, and with no look at what is not there yet where it starts early."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from campaigns.lint.lint_packed import skinny_case
from overweave.schedules.tiles.shape import SHAPES
from tests.compiler.cases import edit
from tests.compiler.listing import Listing
from tools.aot import compile_kernel
from tools.ptx_lint.lint import lint

pytestmark = pytest.mark.slow

SHARED = replace(SHAPES[0], splits=3)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.block_m} rows")
def test_it_passes_and_leaves_room(shape, is_transposed: bool) -> None:
    source, contract = skinny_case("bfloat16", shape, is_transposed)
    compiled = compile_kernel(source)
    assert lint(compiled, contract) == ()
    assert compiled.resources.spill_bytes == 0


def test_a_follower_fetches_its_weight_and_awaits_the_rest() -> None:
    compiled = compile_kernel(skinny_case("bfloat16", SHARED, True, "follows")[0])
    before, _, behind = compiled.ptx.partition("griddepcontrol.wait")
    assert "prefetch.global.L2" in before
    assert not any(word in before for word in ("ld.global", "cp.async", "st.global", "atom."))
    assert "cp.async" in behind


def test_a_leader_says_so_first() -> None:
    compiled = compile_kernel(skinny_case("bfloat16", SHARED, True, "leads")[0])
    before, said, _ = compiled.ptx.partition("griddepcontrol.launch_dependents")
    assert said
    assert "cp.async" not in before


def test_a_share_is_counted_when_all_threads_have_stored_it() -> None:
    ptx = compile_kernel(skinny_case("bfloat16", SHARED, True)[0]).ptx
    before, count, _ = ptx.partition("atom.global.gpu.acq_rel.add")
    stored = before[before.rindex("st.global") :]
    assert count
    assert "bar.sync" in stored


COUNT = r"(atom\.global\.gpu\.acq_rel\.add[^;]*;)"


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("with relaxed order", (r"gpu\.acq_rel\.add", "gpu.relaxed.add")),
        ("with release order", (r"gpu\.acq_rel\.add", "gpu.release.add")),
        ("and cta scope", (r"gpu\.acq_rel\.add", "cta.acq_rel.add")),
        ("heard of the count", (rf"{COUNT}(.*?)bar\.sync\s+0;", r"\1\2")),
        ("nobody counts them", (rf"@%p\d+ {COUNT}", "")),
    ],
)
def test_seeded_violation_among_shares_is_found(what: str, change: tuple[str, str]) -> None:
    source, contract = skinny_case("bfloat16", SHARED, True)
    compiled = compile_kernel(source)
    assert not lint(compiled, contract)
    found = lint(replace(compiled, ptx=edit(compiled.ptx, change)), contract)
    assert [one for one in found if one.rule == "counted-shares" and what in one.what], found


def test_a_share_that_is_counted_before_all_threads_have_stored_it_is_found() -> None:
    source, contract = skinny_case("bfloat16", SHARED, True)
    compiled = compile_kernel(source)
    listing = Listing(compiled.ptx)
    (count,) = listing.having("global", "acq_rel", "add")
    early = listing.without(listing.between(listing.last_before(count, "st", "global"), count, "bar"))
    found = lint(replace(compiled, ptx=early), contract)
    assert [one for one in found if one.rule == "counted-shares" and "no block barrier since" in one.what], found
