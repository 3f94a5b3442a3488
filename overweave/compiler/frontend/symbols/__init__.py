"""Symbolic integers of a kernel: polynomials of its arguments, conditions, and the expressions of directives."""
