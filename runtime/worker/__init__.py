"""Running a batch on the device beside the event loop."""
