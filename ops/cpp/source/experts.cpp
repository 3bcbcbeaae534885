// The kernels of mixtures of experts.
#include "experts.h"
#include "export.h"

using namespace penstock;

template <class T>
constexpr auto experts_up_plain = experts_up<T, false>;
template <class T>
constexpr auto experts_up_rounded = experts_up<T, true>;
template <class T>
constexpr auto experts_down_plain = experts_down<T, false>;
template <class T>
constexpr auto experts_down_rounded = experts_down<T, true>;

KERNELS(route, route)
KERNELS(dispatch, dispatch)
KERNELS(experts_up, experts_up_plain)
KERNELS(experts_up8, experts_up_rounded)
KERNELS(experts_down, experts_down_plain)
KERNELS(experts_down8, experts_down_rounded)
KERNELS(combine, combine)
