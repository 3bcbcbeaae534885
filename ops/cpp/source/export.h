// Exports kernels to Python under names with their dtype, for example `name_float32`.
#pragma once

#include "simd.h"
#include "step.h"

#define PENSTOCK_KERNEL(name, kernel, type)                                            \
    extern "C" void name(const void* operands, const Step& step, ThreadGroup& threads) { \
        kernel<type>(operands, step, threads);                                         \
    }

#define KERNELS(name, kernel)                       \
    PENSTOCK_KERNEL(name##_float32, kernel, float) \
    PENSTOCK_KERNEL(name##_bfloat16, kernel, BFloat16)
