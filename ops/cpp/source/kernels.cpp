// Kernels without products: per token, recurrent states, expert routing, sampling.
#include "experts.h"
#include "export.h"
#include "heads.h"
#include "low_rank.h"
#include "recurrence.h"
#include "sampling.h"
#include "small.h"
#include "whole.h"

using namespace penstock;

template <class T>
constexpr auto begin_any = begin;

template <class T>
constexpr auto angles_any = angles;

template <class T>
constexpr auto add_low_rank_alike = add_low_rank<T, T>;
template <class T>
constexpr auto add_low_rank_wide = add_low_rank<T, float>;

KERNELS(begin, begin_any)
KERNELS(last, last)
KERNELS(pool_rows, pool_rows)
KERNELS(embed, embed)
KERNELS(embed_with_positions, embed_with_positions)
KERNELS(embed_packed, embed_packed)
KERNELS(embed_groups, embed_groups)
KERNELS(norm, norm)
KERNELS(add, add)
KERNELS(angles, angles_any)
KERNELS(rotate, rotate)
KERNELS(store, store_kv)
KERNELS(rotate_store, rotate_store)
KERNELS(gate, gate)
KERNELS(add_low_rank, add_low_rank_alike)
KERNELS(add_low_rank_wide, add_low_rank_wide)
KERNELS(convolve, convolve)
KERNELS(recur, recur)
KERNELS(copy_heads, copy_heads)
KERNELS(route, route)
KERNELS(dispatch, dispatch)
KERNELS(combine, combine)
PENSTOCK_KERNEL(copy_pages_float32, copy_pages, float)
PENSTOCK_KERNEL(draw_float32, draw, float)
PENSTOCK_KERNEL(score_float32, score, float)
