"""`all_to_all(x @ w)`: products travel to the rank that each row is for, as experts return tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Never

import torch

from overweave.ir.operators.matmul_all_to_all import OPERATOR
from overweave.ops.call.groups import GroupLike
from overweave.ops.dispatch.call import call
from overweave.ops.dispatch.library import define

define(OPERATOR)


def matmul_all_to_all(
    x: torch.Tensor,
    w: torch.Tensor,
    group: GroupLike = None,
    *,
    tokens: torch.Tensor | Sequence[int] | None = None,
    counts: torch.Tensor | Sequence[Sequence[int]] | None = None,
    most: int | None = None,
    plan: str | None = None,
    **others: Never,
) -> torch.Tensor:
    """y = all_to_all(x @ w). The products of one block travel while those of the next one are computed.

    Plain torch:  sent = x[tokens] @ w; y = x.new_empty(sum(row[rank] for row in counts), n)
                  dist.all_to_all_single(y, sent, [row[rank] for row in counts], counts[rank])

    x: `[rows, k]`, bf16, fp16 or fp32 (never TF32), row-major. w: `[k, n]`, in either memory layout, each rank's own,
    the same shape on every rank. Returns y `[rows, n]`: the products that rank 0 has for this rank, then those of rank
    1, and so on.
    tokens: rows of x, a list of ints or a 1-D tensor on the CPU, each row once: first those for rank 0, then those for
    rank 1, and so on; rows that are not named go nowhere. None: the rows of x stand in that order.
    counts: `counts[source][target]`, how many rows each rank has for each other one, `[W, W]`, lists or a tensor of
    ints on the CPU, the same on every rank. A rank may have none. None: as many for every rank, on every rank.
    most: an upper bound of all counts, the same on every rank: a plan is made, and proven, for blocks of so many rows,
    and serves every call with it, whatever its counts are. None: the next power of two that is no less than the largest
    count. With counts no call is replayed as a graph; a graph that a caller captures keeps the counts of its capture.
    group: a ProcessGroup, its name, a 1-D DeviceMesh, or None for the world. plan: a schedule of the catalog by its
    short name (`per_peer order=all_peers`); None: chosen, see `overweave.explain`.

    Gradients: that of x by `all_to_all_matmul`, with the counts transposed; that of w by a local matmul, whose other
    factor the library exchanges again. A compiler and a tracer take counts as lists of ints.

    Raises InputError or GroupError for arguments it cannot take, RankMismatch on every rank if ranks differ, in their
    counts too, PeerError for a peer that died or stalled, at this call or, on a GPU, at the next one.
    Source: FlashOverlap (arXiv 2504.19519) 2.3.3, the matmul before an all-to-all.
    """
    given = {"x": x, "w": w, "tokens": tokens, "counts": counts, "most": most, "plan": plan, **others}
    return call(OPERATOR, group, given)["y"]
