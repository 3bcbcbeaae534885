"""Formats of reasoning; `table` has them all by name."""
