"""Runs batches on the device, outside the event loop."""
