"""What latent attention does around attention, in its absorbed form (DeepSeek V2, arXiv 2405.04434).

A backend file holds

    prepare_heads(weight [H, O, I]) -> prepared
    absorb(plain [T, H, N], turned [T, H, P], keys) -> [T, H, R + P]
    expand(read [T, H, W], values, size) -> [T, H * V]
    join(latent [T, R], rotated [T, P]) -> [T, 1, R + P]

`absorb` gives the queries that the cache is asked with: plain[:, h] @ weight[h].T for each head, then what was turned.
`keys` is prepared of [H, R, N]. `expand` gives read[:, h, :R] @ weight[h].T, with `values` prepared of [H, V, R] and
`size` V. `join` puts a token's latent vector and rotated key one behind the other.
"""
