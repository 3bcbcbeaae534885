"""Formats of tool calls, one file per family. `table` lists all formats by name."""
