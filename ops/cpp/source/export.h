// How a unit of the library shows its kernels to Python: `name_float32` for what is computed in float32. A unit that
// uses `KERNELS` is compiled once for each type, as ../build.py says, all of them at the same time.
#pragma once

#include "simd.h"
#include "step.h"

#define KERNEL(name, ...)                                                       \
    extern "C" void name(const void* operands, const Step& step, Team& team) { \
        __VA_ARGS__(operands, step, team);                                      \
    }

#if defined(TYPE)
#define PENSTOCK_JOIN(name, type) name##_##type
#define PENSTOCK_NAME(name, type) PENSTOCK_JOIN(name, type)
#define KERNELS(name, kernel) KERNEL(PENSTOCK_NAME(name, TYPE_NAME), kernel<TYPE>)
#endif
