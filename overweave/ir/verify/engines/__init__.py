"""What a Plan must satisfy for each engine that runs one of its queues."""
