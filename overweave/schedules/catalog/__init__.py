"""Every schedule by name: templates with their options, and the Plan that a name and a Problem make."""
