"""The way of a call: checked, agreed among ranks, its plan chosen, bound once, and run."""
