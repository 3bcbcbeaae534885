"""Grammar libraries, and the constraints that Penstock enforces itself."""
