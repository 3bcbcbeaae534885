"""The kernels: tensors in, tensors out. Knows nothing of the engine around it.

Shape letters, the same in the whole repository: T tokens in the batch, B rows, R rows that sample,
H query heads, K kv heads, D head dim, E model dim, F mlp dim, X experts, V vocabulary, P pages,
S slots, L layers.
"""
