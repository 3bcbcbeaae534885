"""Metrics of an engine for Prometheus. Each engine has its own metrics; there is no global state. Imports no torch."""
