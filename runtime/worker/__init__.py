"""The worker of each rank: runs batches on the device, outside the event loop."""
