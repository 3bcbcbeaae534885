// Attention over the paged cache (contract: ops/attention/__init__.py).
#pragma once

#include "simd.h"
#include "step.h"

namespace penstock {

struct AttendOperands {
    const void* q;          // [T, H, D], tokens q_stride elements apart, heads D apart
    int64_t q_stride;
    const void* k_pool;     // [P, K, page, D], contiguous, of q's type
    const void* v_pool;
    void* out;              // [T, H, D], contiguous
    int64_t num_heads;      // H
    int64_t num_kv_heads;   // K
    int64_t head_dim;       // D
    int64_t window;         // 0: none
    float scale;
    float soft_cap;         // 0: none
    const float* sinks;     // [H] or null
};

}  // namespace penstock
