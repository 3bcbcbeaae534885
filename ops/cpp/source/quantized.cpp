// Products with 8-bit and 4-bit weights.
#include "experts.h"
#include "export.h"
#include "product4.h"
#include "product8.h"
#include "whole.h"

using namespace penstock;

template <class T>
constexpr auto product8_alike = product8<T, T>;
template <class T>
constexpr auto product8_wide = product8<T, float>;
template <class T>
constexpr auto product4_alike = product4<T, T>;
template <class T>
constexpr auto product4_wide = product4<T, float>;
template <class T>
constexpr auto choose_of_8 = choose<T, 8>;
template <class T>
constexpr auto choose_of_4 = choose<T, 4>;
template <class T>
constexpr auto experts_up_of_8 = experts_up<T, 8>;
template <class T>
constexpr auto experts_up_of_4 = experts_up<T, 4>;
template <class T>
constexpr auto experts_down_of_8 = experts_down<T, 8>;
template <class T>
constexpr auto experts_down_of_4 = experts_down<T, 4>;

KERNELS(pack8, pack8)
KERNELS(product8, product8_alike)
KERNELS(product8_wide, product8_wide)
KERNELS(pack4, pack4)
KERNELS(product4, product4_alike)
KERNELS(product4_wide, product4_wide)
KERNELS(choose8, choose_of_8)
KERNELS(choose4, choose_of_4)
KERNELS(experts_up8, experts_up_of_8)
KERNELS(experts_up4, experts_up_of_4)
KERNELS(experts_down8, experts_down_of_8)
KERNELS(experts_down4, experts_down_of_4)
