"""Formats of tool calls, one file per family; `table` lists all of them by name."""
