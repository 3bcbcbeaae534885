// Products with weights in the model's dtype.
#include "experts.h"
#include "export.h"
#include "heads.h"
#include "product.h"
#include "whole.h"

using namespace penstock;

template <class T>
constexpr auto product_alike = product<T, T>;
template <class T>
constexpr auto product_wide = product<T, float>;
template <class T>
constexpr auto choose_plain = choose<T, 0>;
template <class T>
constexpr auto experts_up_plain = experts_up<T, 0>;
template <class T>
constexpr auto experts_down_plain = experts_down<T, 0>;

KERNELS(pack, pack)
KERNELS(product, product_alike)
KERNELS(product_wide, product_wide)
KERNELS(product_heads, product_heads)
KERNELS(choose, choose_plain)
KERNELS(experts_up, experts_up_plain)
KERNELS(experts_down, experts_down_plain)
