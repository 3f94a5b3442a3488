"""Attention of some queries over some keys in plain torch, beside torch's own; and results that are merged."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from overweave.attention import library, plain
from overweave.attention.pieces import Merged, wide
from overweave.attention.plain import Seen
from tests import forked

B, H, G, S, D = 2, 4, 2, 9, 8


def drawn(keys: int = S, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((H, S), (G, keys), (G, keys), (H, S))
    return [torch.randn(B, heads, rows, D, generator=draw).to(dtype) for heads, rows in shapes]


@pytest.mark.parametrize("is_causal", [False, True])
def test_it_is_torchs_attention(is_causal: bool):
    *leaves, gradient = drawn()
    q, k, v = (each.requires_grad_() for each in leaves)
    wanted = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3, enable_gqa=True)
    wanted.backward(gradient)
    with torch.no_grad():
        seen = Seen(0.3, is_causal)
        out, lse = plain.attend(q, k, v, seen)
        found = plain.gradients((gradient, out, lse), q, k, v, seen)
    assert torch.allclose(out, wanted)
    assert all(torch.allclose(each, leaf.grad) for each, leaf in zip(found, leaves, strict=True))  # type: ignore[arg-type]


def test_documents_and_windows_are_torchs_mask():
    q, k, v, _ = drawn()
    offsets = torch.tensor([0, 4, 4, 9])
    at = torch.arange(S)
    before = at[:, None] - at
    mask = ((at < 4)[:, None] == (at < 4)) & (before >= 0) & (before <= 1)
    wanted = functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    assert torch.allclose(plain.attend(q, k, v, Seen(D**-0.5, True, 1, (offsets, offsets)))[0], wanted)


def test_who_sees_nothing_has_zeros_and_minus_infinity():
    q, k, v, gradient = drawn()
    offsets = torch.tensor([2, 5])
    seen = Seen(1.0, True, offsets=(offsets, offsets))
    out, lse = plain.attend(q, k, v, seen)
    blind = [0, 1, 5, 6, 7, 8]
    assert not out[:, :, blind].any()
    assert bool((lse[:, :, blind] == -torch.inf).all())
    found = plain.gradients((gradient, out, lse), q, k, v, seen)
    assert not any(bool(each.isnan().any()) for each in found)
    assert not any(bool(each[:, :, blind].any()) for each in found)


def room(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full_like(like, torch.nan), like.new_full(like.shape[:3], torch.nan, dtype=wide(like.dtype))


def test_merged_pieces_are_the_whole():
    q, k, v, _ = drawn(keys=12)
    wanted, found = plain.attend(q, k, v, Seen(0.5)), room(q)
    merged = Merged(3, found)
    for begin, end in ((4, 12), (0, 1), (1, 4)):
        merged.add(slice(0, S), *plain.attend(q, k[:, :, begin:end], v[:, :, begin:end], Seen(0.5)))
    assert all(torch.allclose(*each) for each in zip(found, wanted, strict=True))


def test_nothing_merged_with_nothing_is_nothing():
    nothing, one = (torch.full((1, 1, 2), -torch.inf) for _ in range(2))
    one[:, :, 1] = 0.0
    found = room(torch.zeros(1, 1, 2, 1))
    merged = Merged(4, found)
    for lse, value in ((nothing, 0.0), (nothing, 0.0), (one, 3.0), (nothing, 0.0)):
        out = torch.where((lse == -torch.inf).unsqueeze(-1), 0.0, torch.full((1, 1, 2, 1), value))
        merged.add(slice(0, 2), out, lse)
    assert found[0].flatten().tolist() == [0.0, 3.0]
    assert found[1].flatten().tolist() == [-torch.inf, 0.0]


def test_parts_are_added_wide():
    """One of whole units, then two of which each alone is less than bf16 can say beside it."""
    found = room(torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16))
    merged, alike = Merged(3, found), torch.zeros(1, 1, 1)
    for out, lse in ((1.0, 0.0), (1.75, -7.0), (1.75, -7.0)):
        merged.add(slice(0, 1), torch.full((1, 1, 1, 1), out, dtype=torch.bfloat16), alike + lse)
    weight = torch.tensor(-7.0).exp()
    assert found[0].item() == ((1.0 + 3.5 * weight) / (1.0 + 2 * weight)).bfloat16().item()


@pytest.mark.slow
def test_the_kernel_merges_as_torch_does():
    done = forked.run("-m", "tests.attention.interpreted_merge")
    assert done.stdout == "0 wrong\n", done.stderr


def test_rows_of_no_document_are_documents_that_see_nothing():
    """As kernels are told of them, which write no other rows."""
    q, k, v, gradient = drawn()
    offsets = torch.tensor([2, 5, 5, 7]), torch.tensor([1, 4, 8, 8])
    found = []
    for each in (offsets, library.covering(offsets, (S, S))):
        seen = Seen(1.0, True, offsets=each)
        out, lse = plain.attend(q, k, v, seen)
        found.append([out, lse, *plain.gradients((gradient, out, lse), q, k, v, seen)])
    assert all(torch.equal(*each) for each in zip(*found, strict=True))
    covered = library.covering(offsets, (S, S))
    assert all(each[0] == 0 and each[-1] == S and bool((each.diff() >= 0).all()) for each in covered)
