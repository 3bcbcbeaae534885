"""From a checkpoint on disk to a decoder that computes."""
