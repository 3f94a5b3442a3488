"""The operators: what each takes, gives and can be asked for, as one record in one file each. No torch here."""
