"""The options, one file per group."""
