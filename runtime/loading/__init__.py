"""Loading a checkpoint: its facts, its quantisation format and its tensors."""
