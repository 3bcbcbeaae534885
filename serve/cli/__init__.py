"""The command line: one module for each command, and the texts of `--help`."""
