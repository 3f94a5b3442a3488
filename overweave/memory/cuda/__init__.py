"""The memory of GPUs: the symmetric heap, workspaces, the copy engine, streams and the watcher."""
