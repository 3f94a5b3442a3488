"""`all_to_all(x) @ w`: rows travel to the rank whose weight they are multiplied by, as tokens do to experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Never

import torch

from overweave.ir.operators.all_to_all_matmul import OPERATOR
from overweave.ops.call.groups import GroupLike
from overweave.ops.dispatch.call import call
from overweave.ops.dispatch.library import define

define(OPERATOR)


def all_to_all_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    group: GroupLike = None,
    *,
    counts: torch.Tensor | Sequence[Sequence[int]] | None = None,
    most: int | None = None,
    plan: str | None = None,
    **others: Never,
) -> torch.Tensor:
    """y = all_to_all(x) @ w. Each rank waits for its peers' blocks of rows, one by one, while it multiplies.

    Plain torch:  received = x.new_empty(sum(row[rank] for row in counts), k)
                  dist.all_to_all_single(received, x, [row[rank] for row in counts], counts[rank]); y = received @ w

    x: `[rows, k]`, bf16, fp16 or fp32 (never TF32), row-major: the block of rows for rank 0, then that for rank 1, and
    so on. w: `[k, n]`, in either memory layout, each rank's own, the same shape on every rank. Returns y `[rows, n]`:
    the products of the block from rank 0, then of that from rank 1, and so on.
    counts: `counts[source][target]`, the rows of each block, `[W, W]`, lists or a tensor of ints on the CPU, the same
    on every rank. A block may be empty. None: the rows of x are W blocks of the same size on every rank.
    most: an upper bound of all counts, the same on every rank: a plan is made, and proven, for blocks of so many rows,
    and serves every call with it, whatever its counts are. None: the next power of two that is no less than the largest
    count. The workspace has room for W blocks of `most` rows. With counts a plan of copies and library matmuls is
    taken, and no call is replayed as a graph; a graph that a caller captures keeps the counts of its capture.
    group: a ProcessGroup, its name, a 1-D DeviceMesh, or None for the world. plan: a schedule of the catalog by its
    short name (`per_peer order=all_peers`); None: chosen, see `overweave.explain`.

    Gradients: that of x by `matmul_all_to_all`, with the counts transposed; that of w by a local matmul, whose other
    factor the library exchanges again. A compiler and a tracer take counts as lists of ints.

    Raises InputError or GroupError for arguments it cannot take, RankMismatch on every rank if ranks differ, in their
    counts too, PeerError for a peer that died or stalled, at this call or, on a GPU, at the next one.
    Source: FiCCO, all-to-all before the layers of experts.
    """
    given = {"x": x, "w": w, "counts": counts, "most": most, "plan": plan, **others}
    return call(OPERATOR, group, given)["y"]
