"""One script per peer, run by the Python of the peer's environment. None of them imports Penstock.

`SCRIPT convert` writes the checkpoint in the engine's format. `SCRIPT run` loads it and answers jobs.
"""
