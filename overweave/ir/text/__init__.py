"""Text and JSON forms of Schedules and Plans: printed, parsed, and read from files."""
