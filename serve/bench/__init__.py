"""Measures servers and the engine itself: `python -m serve.bench --help`.

`serving` drives any server over HTTP, `offline` and `latency` drive the engine in this process.
"""

PROGRAM = "python -m serve.bench"  # as usage texts and result files name it
