"""Measures servers and the engine itself: `python -m serve.bench --help`.

`serving` drives any server over HTTP, `offline` and `latency` drive the engine in this process, `overhead`
measures what the engine costs without a model, `checkpoint` writes random models to measure with.
"""
