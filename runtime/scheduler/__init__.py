"""Which tokens are computed in the next step, and what their results mean: pure functions on plain data."""
