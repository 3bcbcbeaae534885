"""Metrics of an engine for Prometheus. There is no global state: each engine has its own metrics. Torch-free."""
