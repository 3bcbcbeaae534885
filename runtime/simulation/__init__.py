"""A simulator: the scheduler over a virtual clock."""
