"""Rewriting of JSON schemas with the keywords that a grammar library enforces exactly."""
