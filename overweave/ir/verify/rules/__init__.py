"""What every Schedule must satisfy: form, order, coverage, races, deadlock, reuse."""
