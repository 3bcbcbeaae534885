"""Calls that return scores of texts instead of generated text."""
