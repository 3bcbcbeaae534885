// Low-rank additions of adapters (contract: ops/low_rank/__init__.py): y += B (A x), with the A and B of a token's
// slot.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "simd.h"
#include "step.h"

namespace penstock {

struct AddLowRankOperands {
    const void* x;         // [tokens, size]
    void* y;               // [tokens, out_size], in place; float in the wide kernel
    const int32_t* slots;  // [tokens]; 0: nothing is added
    const void* a;         // [num_slots, parts, rank, size]
    const void* b;         // [num_slots, rank, out_size]
    const int32_t* ranks;  // [num_slots], at most `rank`
    const int64_t* ends;   // [parts], end of each sub-layer's output columns
    float* shrunk;         // [tokens, parts, rank], scratch
    int64_t tokens;        // 0: the number of tokens of the step
    int64_t x_stride, y_stride;
    int64_t size, out_size;
    int64_t num_slots, parts, rank;
};

// Tokens of one slot: indices first .. first + count - 1 of `LowRankOrder::tokens`.
struct LowRankChunk {
    int64_t slot;  // index in the weights
    int64_t first, count;
};

// The tokens that an adapter changes, sorted by slot. Each thread computes the same order.
struct LowRankOrder {
    static constexpr int64_t CHUNK = 32;

    std::vector<int64_t> tokens, ends;
    std::vector<LowRankChunk> chunks;

    void sort(const AddLowRankOperands& o, int64_t num_tokens) {
        chunks.clear();
        ends.assign(o.num_slots, 0);
        int64_t total = 0;
        for (int64_t token = 0; token < num_tokens; token++) {
            const int64_t slot = o.slots[token] - 1;
            if (slot >= 0 && o.ranks[slot]) ends[slot]++, total++;
        }
        if (!total) return;
        tokens.resize(total);
        int64_t next = 0;
        for (int64_t slot = 0; slot < o.num_slots; slot++) {
            const int64_t count = ends[slot];
            for (int64_t done = 0; done < count; done += CHUNK)
                chunks.push_back({slot, next + done, std::min(CHUNK, count - done)});
            ends[slot] = next;
            next += count;
        }
        for (int64_t token = 0; token < num_tokens; token++) {
            const int64_t slot = o.slots[token] - 1;
            if (slot >= 0 && o.ranks[slot]) tokens[ends[slot]++] = token;
        }
    }
};

// Dot products of one x with ROWS consecutive rows of A.
template <int ROWS, class T>
inline void shrink_rows(const T* x, const T* a, int64_t size, float* out) {
    Floats sums[ROWS] = {};
    in_vectors(size, [&](int64_t k, int64_t count) {
        const Floats value = load(x + k, count);
        for (int row = 0; row < ROWS; row++) sums[row] += value * load(a + row * size + k, count);
    });
    for (int row = 0; row < ROWS; row++) out[row] = sum(sums[row]);
}

// Adds the product of one line of `shrunk` with `count` columns of B, at most VECTORS * LANES, to y.
template <int VECTORS, class T, class Y>
inline void expand_columns(const float* shrunk, const T* b, int64_t stride, int64_t rank, Y* y, int64_t count) {
    Floats sums[VECTORS] = {};
    for (int64_t r = 0; r < rank; r++) {
        const Floats factor = fill(shrunk[r]);
        for (int i = 0; i < VECTORS; i++) {
            const int64_t width = std::min<int64_t>(LANES, count - i * LANES);
            if (width > 0) sums[i] += factor * load(b + r * stride + i * LANES, width);
        }
    }
    for (int i = 0; i < VECTORS; i++) {
        const int64_t width = std::min<int64_t>(LANES, count - i * LANES);
        if (width > 0) store(y + i * LANES, load(y + i * LANES, width) + sums[i], width);
    }
}

template <class T, class Y>
void add_low_rank(const void* operands, const Step& step, ThreadGroup& threads) {
    constexpr int64_t ROWS = 4, COLUMNS = 256;
    constexpr int VECTORS = 4;
    thread_local LowRankOrder order;
    const auto& o = *static_cast<const AddLowRankOperands*>(operands);
    order.sort(o, o.tokens ? o.tokens : step.num_tokens);
    const int64_t num_chunks = order.chunks.size();
    if (!num_chunks) return;  // on every thread

    const int64_t row_blocks = (o.rank + ROWS - 1) / ROWS, lines = o.parts * row_blocks;
    threads.share(num_chunks * lines, [&](int64_t task) {
        const LowRankChunk& chunk = order.chunks[task / lines];
        const int64_t part = task % lines / row_blocks, first = task % row_blocks * ROWS;
        const int64_t rows = std::min(ROWS, o.ranks[chunk.slot] - first);
        if (rows <= 0) return;
        const T* a = static_cast<const T*>(o.a) + ((chunk.slot * o.parts + part) * o.rank + first) * o.size;
        for (int64_t i = chunk.first; i < chunk.first + chunk.count; i++) {
            const int64_t token = order.tokens[i];
            const T* x = static_cast<const T*>(o.x) + token * o.x_stride;
            float* out = o.shrunk + (token * o.parts + part) * o.rank + first;
            if (rows == ROWS) {
                shrink_rows<ROWS>(x, a, o.size, out);
            } else {
                for (int64_t row = 0; row < rows; row++) shrink_rows<1>(x, a + row * o.size, o.size, out + row);
            }
        }
    });
    threads.barrier();

    const int64_t blocks = (o.out_size + COLUMNS - 1) / COLUMNS;
    threads.share(num_chunks * blocks, [&](int64_t task) {
        const LowRankChunk& chunk = order.chunks[task / blocks];
        const int64_t begin = task % blocks * COLUMNS, end = std::min(begin + COLUMNS, o.out_size);
        const T* b = static_cast<const T*>(o.b) + chunk.slot * o.rank * o.out_size;
        for (int64_t i = chunk.first; i < chunk.first + chunk.count; i++) {
            const int64_t token = order.tokens[i];
            Y* y = static_cast<Y*>(o.y) + token * o.y_stride;
            int64_t part = 0;
            for (int64_t column = begin; column < end;) {
                while (column >= o.ends[part]) part++;
                const int64_t count = std::min<int64_t>(std::min(end, o.ends[part]) - column, VECTORS * LANES);
                const float* shrunk = o.shrunk + (token * o.parts + part) * o.rank;
                expand_columns<VECTORS>(shrunk, b + column, o.out_size, o.ranks[chunk.slot], y + column, count);
                column += count;
            }
        }
    });
}

}  // namespace penstock
