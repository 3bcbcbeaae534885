"""The engine: actors, scheduling, KV cache and model execution. This package does not depend on HTTP."""
