"""The memory of CPU ranks: a heap in shared memory, its workspace and its locks."""
