"""The fused kernel as written: readable Triton source, and the module that holds it."""
