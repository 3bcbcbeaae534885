"""A simulator: runs the scheduler with a virtual clock, without a model."""
