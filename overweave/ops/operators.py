"""The operators behind one face, for whatever compares or tunes them: plan by plan, on local tensors."""

from __future__ import annotations

from overweave.ops.all_gather_matmul import all_gather_matmul
from overweave.ops.matmul_all_reduce import matmul_all_reduce
from overweave.ops.matmul_reduce_scatter import matmul_reduce_scatter
from overweave.tuner.baselines import OperatorCall

OPERATORS: dict[str, OperatorCall] = {
    "all_gather_matmul": lambda x, w, group, *, m, plan: all_gather_matmul(x, w, group, m=m, plan=plan),
    "matmul_reduce_scatter": lambda x, w, group, *, m, plan: matmul_reduce_scatter(x, w, group, plan=plan),
    "matmul_all_reduce": lambda x, w, group, *, m, plan: matmul_all_reduce(x, w, group, plan=plan),
}
