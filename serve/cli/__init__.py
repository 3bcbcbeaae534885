"""The command line: one module per command or group of commands, and the texts of `--help`."""
