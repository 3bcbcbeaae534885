"""Formats of tool calls, one module per family of formats. `table` lists all formats by name."""
