"""One script for each engine, run by the Python of that engine's own environment. None imports Penstock.

`SCRIPT convert` writes the checkpoint in the engine's own form; `SCRIPT run` loads it and answers jobs.
"""
