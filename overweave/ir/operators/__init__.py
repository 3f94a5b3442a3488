"""The operators, one record in one file each: operands, result, epilogues, baselines. No torch here."""
