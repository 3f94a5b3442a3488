"""Plans on GPUs: bound to a slot of a workspace, launched, replayed as graphs."""
