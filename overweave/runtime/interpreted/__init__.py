"""Patches of Triton's interpreter: it computes what a GPU computes, in every dtype."""
