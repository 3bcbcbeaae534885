// All kernels but attention, which takes as long to compile as these.
#include "export.h"
#include "heads.h"
#include "product.h"
#include "product4.h"
#include "product8.h"
#include "recurrence.h"
#include "small.h"
#include "whole.h"

using namespace penstock;

template <class T>
constexpr auto begin_any = begin;

template <class T>
constexpr auto product_alike = product<T, T>;
template <class T>
constexpr auto product_wide = product<T, float>;
template <class T>
constexpr auto product8_alike = product8<T, T>;
template <class T>
constexpr auto product8_wide = product8<T, float>;

template <class T>
constexpr auto product4_alike = product4<T, T>;
template <class T>
constexpr auto product4_wide = product4<T, float>;

template <class T>
constexpr auto choose_plain = choose<T, 0>;
template <class T>
constexpr auto choose_of_8 = choose<T, 8>;
template <class T>
constexpr auto choose_of_4 = choose<T, 4>;

KERNELS(begin, begin_any)
KERNELS(last, last)
KERNELS(choose, choose_plain)
KERNELS(choose8, choose_of_8)
KERNELS(choose4, choose_of_4)

KERNELS(embed, embed)
KERNELS(embed_placed, embed_placed)
KERNELS(embed_packed, embed_packed)
KERNELS(norm, norm)
KERNELS(add, add)
KERNELS(rotate, rotate)
KERNELS(store, store_kv)
KERNELS(rotate_store, rotate_store)
KERNELS(gate, gate)
KERNELS(convolve, convolve)
KERNELS(recur, recur)
KERNELS(product_heads, product_heads)
KERNELS(copy_heads, copy_heads)
KERNELS(pack, pack)
KERNELS(product, product_alike)
KERNELS(product_wide, product_wide)
KERNELS(pack8, pack8)
KERNELS(product8, product8_alike)
KERNELS(product8_wide, product8_wide)
KERNELS(pack4, pack4)
KERNELS(product4, product4_alike)
KERNELS(product4_wide, product4_wide)
