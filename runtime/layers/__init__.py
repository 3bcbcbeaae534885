"""The blocks that models are made of. Each takes its kernels, and knows its parts' names in a checkpoint."""
