"""What ranks see of each other's keys: together exactly the mask, in both layouts; and torch's layout is ours."""

from __future__ import annotations

import pytest
import torch

from overweave.attention import plain, zigzag_order
from overweave.attention.plain import Seen
from overweave.attention.sequence import Piece, Sequence, offsets_within

MASKS = {"all": (False, None), "causal": (True, None), "window of 1": (True, 1), "of 3": (True, 3), "of 40": (True, 40)}


def seen_by_pieces(sequence: Sequence) -> torch.Tensor:
    """How often each query of the sequence sees each key."""
    count = torch.zeros(sequence.rows, sequence.rows, dtype=torch.int32)
    for rank in range(sequence.ranks):
        for source in range(sequence.ranks):
            piece = sequence.piece(rank, source)
            if piece is None:
                continue
            queries, keys = (at(sequence, *each) for each in ((rank, piece.queries), (source, piece.keys)))
            seen = plain.is_seen((len(queries), len(keys)), Seen(1.0, piece.is_causal, piece.left), count.device)
            count[queries[:, None], keys] += seen
    return count


def at(sequence: Sequence, rank: int, part: slice) -> torch.Tensor:
    return torch.cat([torch.arange(low, high) for low, high in sequence.places(rank, part)])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_zigzag", [False, True])
def test_pieces_are_the_mask(mask: str, is_zigzag: bool):
    is_causal, window = MASKS[mask]
    if is_zigzag and window is not None:
        return  # refused
    for ranks in range(1, 9):
        for rows in (2 * ranks, 4 * ranks) if is_zigzag else {1, ranks - 1 or 1, 2 * ranks + 1, 17}:
            left = None if window is None else window - 1
            wanted = plain.is_seen((rows, rows), Seen(1.0, is_causal, left), torch.device("cpu"))
            found = seen_by_pieces(Sequence(rows, ranks, is_causal, is_zigzag, window))
            assert torch.equal(found, wanted.int()), (ranks, rows)


def test_a_window_that_ends_in_an_earlier_shard_leaves_rows_at_home():
    sequence = Sequence(16, 4, is_causal=True, window=3)
    assert sequence.piece(2, 1) == Piece(slice(0, 2), slice(2, 4), left=0)
    assert sequence.piece(2, 0) is None


def test_zigzag_is_as_much_work_for_every_rank():
    found = seen_by_pieces(Sequence(24, 3, is_causal=True, is_zigzag=True))
    rows = zigzag_order(24, 3).chunk(3)
    assert len({int(found[each].sum()) for each in rows}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_zigzag_is_torchs_head_tail(ranks: int):
    balancer = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    rows = 6 * ranks
    theirs = balancer._HeadTailLoadBalancer(rows, ranks, "cpu")._generate_indices().flatten()
    assert torch.equal(zigzag_order(rows, ranks), theirs.long())
    sequence = Sequence(rows, ranks, is_zigzag=True)
    stored = torch.cat([at(sequence, rank, slice(0, sequence.own(rank))) for rank in range(ranks)])
    assert torch.equal(stored, theirs.long())


def test_documents_begin_where_their_rows_do():
    offsets = torch.tensor([1, 3, 3, 9, 11])
    assert offsets_within(offsets, [(2, 4), (10, 12)]).tolist() == [0, 1, 1, 2, 3]
    assert offsets_within(offsets, []).tolist() == [0] * 5
