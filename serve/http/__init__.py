"""HTTP code that all APIs share: reading requests and writing answers."""
