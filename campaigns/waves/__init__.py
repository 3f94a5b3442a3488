"""What groups of waves cost and when they fill, on one GPU."""
