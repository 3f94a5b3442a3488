"""What is known of the numbers of a kernel: polynomials of its arguments, their values, and what directives name."""
