"""Benchmarks of servers and of the engine: `python -m serve.bench --help`.

`serving` measures any server over HTTP. `offline` and `latency` measure the engine in this process.
"""

PROGRAM = "python -m serve.bench"  # name in usage texts and result files
