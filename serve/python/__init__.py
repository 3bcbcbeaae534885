"""The Python API of the engine: `Engine` and `SyncEngine`."""
