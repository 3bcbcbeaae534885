"""Builds the batch of each step and applies its results. Synchronous, without torch."""
