"""Several processes for one model: the mesh of ranks, their links, and the workers' lives."""
