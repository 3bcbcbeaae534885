"""Computes token masks while outputs are generated."""
