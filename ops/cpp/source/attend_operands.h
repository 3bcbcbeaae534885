// Operands of attention, and sizes of its tasks.
#pragma once

#include <cstdint>

#include "float8.h"

namespace penstock {

struct AttendOperands {
    const void* q;          // [T, H, D], tokens q_stride elements apart, heads D apart
    int64_t q_stride;
    const void* k_pool;     // [P, K, page, D], contiguous, of `type`
    const void* v_pool;
    void* out;              // [T, H, D], contiguous
    int64_t num_heads;      // H
    int64_t num_kv_heads;   // K
    int64_t head_dim;       // D, a multiple of 16
    int64_t window;         // 0: no window
    int64_t chunked;        // whether tokens attend only within their chunk of `window` positions
    float scale;
    float soft_cap;         // 0: no cap
    const float* sinks;     // [H] or null
    const float* slopes;    // [H] or null; excludes a soft cap
    float* parts;           // scratch for partial results; with more memory, more keys can be shared and divided
    int64_t num_parts;      // size of `parts` in floats
    // page table of a pool with its own pages, as wide as the step's; null: the step's page table
    const int32_t* page_table;
    CacheType type;         // dtype of both pools; `scale` includes the keys' scale
    float v_scale;          // scale of the pool's values
    int64_t below;          // rows with this many tokens or more are skipped; 0: no row is skipped
};

constexpr int64_t TILE_ROWS = 256;  // maximum number of rows that share packed keys
constexpr int64_t DIVISION = 8;     // a tile's keys are divided if it has more than 1 / DIVISION of a thread's work

// Cost of a tile, in blocks of keys times rows. Fetching and packing the keys costs as much as 32 rows.
inline int64_t cost_of(int64_t blocks, int64_t rows) { return blocks * (32 + rows); }

// Number of floats of a part: for each row, a weighted sum of values and its mass.
inline int64_t part_size(int64_t rows, int64_t head_dim) { return rows * (head_dim + 2); }

}  // namespace penstock
