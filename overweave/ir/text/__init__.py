"""Forms of Schedules and Plans outside the process: printed, parsed, and read from files."""
