"""Embedding of token ids, and conversion of products to logits. The vocabulary may be sharded over ranks.

A backend file defines

    embed(token_ids int64 [T], weight [V', E], first_id=None, *, scale=None, media=None) -> [T, E]
    embed_with_positions(token_ids int64 [T], weight [V, E], positions int64 [T], position_weight [N, E] | None,
                         type_weight [N, E] | None, second_starts int32 [T] | None) -> [T, E]
    reads(prepared [V', E]) -> bool
    as_logits(products [R, V'], *, scale=None, soft_cap=None) -> float32 [R, V']

`embed` returns row `id - first_id` of `weight` for ids in first_id .. first_id + V' - 1, and zeros for other ids.
Therefore the sum over ranks is the lookup in the whole vocabulary. Without `first_id`, `weight` has the whole
vocabulary. Rows are multiplied by `scale` and rounded to the weight's dtype. `media` is a pair: vectors [T, E] in the
weight's dtype, and a mask, bool [T]. Tokens for which the mask is true get their vector of `media` instead of a row,
and their ids are ignored. `media` and `first_id` cannot be combined.

`embed_with_positions` adds the vector of a token's position and the vector of its type. A token has the second type
if its element of `second_starts` is not 0 and its position is at least that element. Otherwise it has the first type.

`reads` returns whether `embed` accepts a weight that `ops.matmul` has prepared. If so, a model with tied embeddings
keeps only the prepared weight.

`as_logits` converts the products of hidden states and a rank's part of the vocabulary to float32 logits. It
multiplies them by `scale` and then, if `soft_cap` is given, replaces each logit by soft_cap * tanh(logit / soft_cap).
It may overwrite `products`; use the returned tensor.
"""
