"""The kernels of tokens' metadata, interpreted, and plain torch: `python -m tests.moe.interpreted_travelling`.

Prints what is wrong.
"""

from __future__ import annotations

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from unittest.mock import patch  # noqa: E402

import torch  # noqa: E402

from overweave.moe.routing import route  # noqa: E402
from overweave.moe.travelling import Travelling, positions_of  # noqa: E402
from overweave.runtime.gpu import travelling  # noqa: E402

CASES = ((7, 3, 6, 2, False, 0), (5, 1, 4, 4, True, 3), (40, 8, 30, 3, True, 0), (9, 2, 5, 1, True, 4))


def given_of(tokens: int, top: int, experts: int, has_weights: bool, scales: int) -> Travelling:
    ids = torch.randint(-2, experts + 1, (tokens, top)).clamp(-1)
    weights = torch.randn(tokens, top).bfloat16() if has_weights else None
    return Travelling(torch.randn(tokens, 4), torch.randn(tokens, scales) if scales else None, weights, ids)


def wrong(given: Travelling, experts: int, ranks: int) -> list[str]:
    """What kernels make otherwise."""
    targets, metadata = given.targets_and_metadata(experts, ranks)
    routed_ids = torch.where(targets == ranks, -1, targets)  # a wrong id is refused on a CPU
    routed = route(routed_ids, ranks)
    positions, told = positions_of(routed_ids, routed)
    found, words = torch.full_like(targets, 99), torch.full_like(metadata, 99)
    travelling.choose_ranks(
        (given.ids, given.weights, given.row_scales), (found, words), (experts, -(-experts // ranks), ranks)
    )
    is_named = given.ids < experts
    top = given.ids.shape[1]
    same = [torch.equal(found, targets), torch.equal(words[:, top:], metadata[:, top:])]
    same.append(torch.equal(words[:, :top][is_named], metadata[:, :top][is_named]))
    outputs = torch.full_like(positions, 99), torch.full_like(told, 99)
    travelling.place_rows(routed_ids, (routed.places, routed.offsets, routed.counts, routed.reason), outputs)
    same += [torch.equal(outputs[0], positions), torch.equal(outputs[1], told)]
    for rank in range(ranks):
        of_torch = given.read(words, experts, [rank, ranks])
        kernel = [torch.full_like(each, 99) for each in of_torch]
        low = min(rank * -(-experts // ranks), experts)
        own = (low, min(low + -(-experts // ranks), experts))
        passed = (kernel[0], *(each if each.shape[1] else None for each in kernel[1:]))
        travelling.read_metadata(words, passed, own)
        same += [torch.equal(a, b) for a, b in zip(kernel, of_torch, strict=True)]
    return [str(at) for at, is_same in enumerate(same) if not is_same]


def main() -> None:
    torch.manual_seed(0)
    count = 0
    with patch("torch.cuda.device"), patch.object(travelling, "ELEMENTS", 128):  # several programs
        for tokens, top, experts, ranks, has_weights, scales in CASES:
            found = wrong(given_of(tokens, top, experts, has_weights, scales), experts, ranks)
            count += len(found)
            if found:
                print(tokens, top, experts, ranks, found)
    print(f"{count} wrong")


if __name__ == "__main__":
    main()
