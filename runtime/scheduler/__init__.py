"""Builds the batch of each step and applies its results. The code is synchronous and does not use torch."""
