"""From an author's annotated kernel to the fused source, ahead-of-time compiles, and the lint of their PTX."""
