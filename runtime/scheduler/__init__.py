"""Which tokens are computed in the next step, and what their results mean: synchronous and without torch."""
