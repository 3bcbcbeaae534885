// The kernels of mixtures of experts.
#include "experts.h"
#include "export.h"

using namespace penstock;

template <class T>
constexpr auto experts_up_plain = experts_up<T, 0>;
template <class T>
constexpr auto experts_up_of_8 = experts_up<T, 8>;
template <class T>
constexpr auto experts_up_of_4 = experts_up<T, 4>;
template <class T>
constexpr auto experts_down_plain = experts_down<T, 0>;
template <class T>
constexpr auto experts_down_of_8 = experts_down<T, 8>;
template <class T>
constexpr auto experts_down_of_4 = experts_down<T, 4>;

KERNELS(route, route)
KERNELS(dispatch, dispatch)
KERNELS(experts_up, experts_up_plain)
KERNELS(experts_up8, experts_up_of_8)
KERNELS(experts_up4, experts_up_of_4)
KERNELS(experts_down, experts_down_plain)
KERNELS(experts_down8, experts_down_of_8)
KERNELS(experts_down4, experts_down_of_4)
KERNELS(combine, combine)
