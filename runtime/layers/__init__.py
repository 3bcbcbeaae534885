"""Layers that models are built from. Each layer holds its kernels and the names of its checkpoint tensors."""
