"""What is counted while the engine runs, as Prometheus reads it. Torch-free, and nothing global: one set an engine."""
