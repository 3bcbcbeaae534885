// What attention is given, and how much of it one task takes.
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
    int64_t window;         // 0: none
    int64_t chunked;        // whether positions are divided into chunks of `window`, and each sees its own alone
    float scale;
    float soft_cap;         // 0: none
    const float* sinks;     // [H] or null
    const float* slopes;    // [H] or null; without a soft cap
    float* parts;           // for what tasks give each other; with more room, more keys are shared and divided
    int64_t num_parts;      // floats there
    const int32_t* page_table;  // of a pool with pages of its own, as wide as the step's; null: the step's
    CacheType type;         // of both pools; the keys' scale is a part of `scale`
    float v_scale;          // of the values that the pool holds
    int64_t below;          // tokens: rows of as many or more are left out; 0: none are
};

constexpr int64_t TILE_ROWS = 256;  // that share packed keys, at most
constexpr int64_t DIVISION = 8;     // tasks for each thread: a tile that is more than one of them is divided

// In blocks of keys times rows; keys have to be fetched and packed whoever reads them.
inline int64_t cost_of(int64_t blocks, int64_t rows) { return blocks * (32 + rows); }

// How many floats a part takes: for each row a sum of values and its mass.
inline int64_t part_size(int64_t rows, int64_t head_dim) { return rows * (head_dim + 2); }

}  // namespace penstock
