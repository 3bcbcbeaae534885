"""The engine: actors, scheduling, cache, model execution. Knows nothing of HTTP."""
