"""What is computed and moved, as data: Schedules, Plans, Problems, tile orders, and the records of operators."""
