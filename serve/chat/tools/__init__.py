"""Formats of tool calls, one file for each family of them; `table` has them all by name."""
