"""Every schedule by name: the Plan that a name, options and a Problem make."""
