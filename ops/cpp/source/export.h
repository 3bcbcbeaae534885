// How a unit of the library shows its kernels to Python: `name_float32` for what is computed in float32. Its units are
// compiled once for each type, as ../build.py says, all of them at the same time.
#pragma once

#include "simd.h"
#include "step.h"

#define PENSTOCK_JOIN(name, type) name##_##type
#define PENSTOCK_NAME(name, type) PENSTOCK_JOIN(name, type)

#define KERNELS(name, kernel)                                                                              \
    extern "C" void PENSTOCK_NAME(name, TYPE_NAME)(const void* operands, const Step& step, ThreadGroup& threads) { \
        kernel<TYPE>(operands, step, threads);                                                                \
    }
