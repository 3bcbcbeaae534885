"""HTTP code common to all APIs: read requests and write answers."""
