"""Benchmarks of servers and of the engine: `python -m serve.bench --help`.

`serving` measures any server over HTTP. `offline` and `latency` run the engine in this process and measure it.
"""

PROGRAM = "python -m serve.bench"  # name in usage texts and result files
