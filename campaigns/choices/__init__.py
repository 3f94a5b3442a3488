"""What each choice is worth, and whether the model and the tables choose well."""
