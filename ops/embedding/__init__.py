"""Both ends of a vocabulary that may be cut over ranks: vectors of token ids, and logits.

A backend file holds

    embed(token_ids int64 [T], weight [V', E], first_id=None, *, scale=None) -> [T, E]
    embed_placed(token_ids int64 [T], words [V, E], positions int64 [T], places [N, E] | None, type [E] | None)
        -> [T, E]
    reads(prepared [V', E]) -> bool
    as_logits(products [R, V'], *, scale=None, soft_cap=None) -> float32 [R, V']

`embed` gives row `id - first_id` of `weight` for each of its own ids, first_id .. first_id + V' - 1, and zeros for all
others, so that the sum over ranks is the lookup of the whole vocabulary. Without a `first_id` the weight is all of it,
and every id lies in it. Rows are multiplied by `scale` and rounded to the weight's dtype.
`embed_placed` adds what stands for a token's position and for the type of all of them. `reads` tells whether `embed`
takes a weight also as `ops.matmul` has prepared it: then a model whose two ends have one weight holds it once.
`as_logits` turns the products of hidden states and a rank's part of the vocabulary into logits: in float32, times
`scale`, then bounded to soft_cap * tanh(logit / soft_cap). `products` may be overwritten: use what it returns.
"""
