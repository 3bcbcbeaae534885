"""Kernels: functions from tensors to tensors, independent of the engine.

Letters of shapes in the whole repository, unless a docstring gives a letter another meaning: T tokens in the batch,
B rows, R sampled rows, H query heads, K kv heads, D head dim, E model dim, F mlp dim, X experts, V vocabulary, P pages,
S slots, L layers.
"""
