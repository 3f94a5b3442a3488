"""Mixture-of-experts layers: on one GPU, tensor parallel and expert parallel."""

from overweave.moe.dispatch import Dispatched, combine, dispatch
from overweave.moe.fp8 import quantise_rows
from overweave.moe.glu import GPT_OSS, Glu
from overweave.moe.grouped import grouped_matmul
from overweave.moe.layer import ExpertsMlp
from overweave.moe.overlapped import ExpertWeights
from overweave.moe.pairs import RoutedTokens, experts_matmul, experts_sum
from overweave.moe.pushed import Push
from overweave.moe.routing import Routing, route
from overweave.moe.tensor_parallel import (
    all_gather_experts,
    experts_all_reduce,
    experts_mlp,
    experts_reduce_scatter,
)

__all__ = [
    "GPT_OSS",
    "Dispatched",
    "ExpertWeights",
    "ExpertsMlp",
    "Glu",
    "Push",
    "RoutedTokens",
    "Routing",
    "all_gather_experts",
    "combine",
    "dispatch",
    "experts_all_reduce",
    "experts_matmul",
    "experts_mlp",
    "experts_reduce_scatter",
    "experts_sum",
    "grouped_matmul",
    "quantise_rows",
    "route",
]
