"""Several processes for one model: rendezvous, links, and the lifecycle of workers."""
