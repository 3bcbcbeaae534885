"""JSON schemas, rewritten with the keywords that a grammar library enforces exactly."""
