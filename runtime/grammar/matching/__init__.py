"""Computation of token masks while outputs are generated."""
