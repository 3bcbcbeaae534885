// What is done to each token by itself, states, the routing of experts, and the choice of tokens: no products.
#include "experts.h"
#include "export.h"
#include "heads.h"
#include "recurrence.h"
#include "sampling.h"
#include "small.h"
#include "whole.h"

using namespace penstock;

template <class T>
constexpr auto begin_any = begin;

KERNELS(begin, begin_any)
KERNELS(last, last)
KERNELS(pool_texts, pool_texts)
KERNELS(embed, embed)
KERNELS(embed_placed, embed_placed)
KERNELS(embed_packed, embed_packed)
KERNELS(embed_groups, embed_groups)
KERNELS(norm, norm)
KERNELS(add, add)
KERNELS(rotate, rotate)
KERNELS(store, store_kv)
KERNELS(rotate_store, rotate_store)
KERNELS(gate, gate)
KERNELS(convolve, convolve)
KERNELS(recur, recur)
KERNELS(copy_heads, copy_heads)
KERNELS(route, route)
KERNELS(dispatch, dispatch)
KERNELS(combine, combine)
PENSTOCK_KERNEL(draw_float32, draw, float)
