"""Random schedules that are right by construction."""
