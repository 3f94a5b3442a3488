"""One traced call of a Plan: what ran when, on GPUs and on CPU ranks."""
