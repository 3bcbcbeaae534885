"""Metrics of the engine for Prometheus. Torch-free, without global state: each engine has its own set."""
