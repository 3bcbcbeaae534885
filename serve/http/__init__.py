"""HTTP machinery that all APIs share: reading requests and writing answers."""
