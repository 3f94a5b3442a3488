"""Mixture-of-experts on one GPU: the grouped matmul, and the routing that tells which rows belong to which expert."""

from overweave.moe.grouped import grouped_matmul
from overweave.moe.routing import Routing, route

__all__ = ["Routing", "grouped_matmul", "route"]
