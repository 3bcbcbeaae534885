// Products of 8-bit weights with 8-bit activations.
//
// A weight [O, I] is w = scale[o] * q, with q in -127 .. 127 stored as q + 128 in panels [O / 32][I / 4][32][4]. Each
// row of x is rounded to 8 bits with its own scale. Products are summed exactly in int32 over the whole depth and
// converted to float once, so vector and matrix units compute the same results. Panels and rounded rows are padded with
// zeros to whole steps of the matrix unit, so any depth is allowed.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "product.h"

namespace penstock {

constexpr int64_t QUAD = 4;             // bytes per lane
constexpr int64_t MAX_DEPTH8 = 1 << 16;  // maximum depth for which no sum exceeds int32
static_assert(MAX_DEPTH8 * 127 * 255 < int64_t(1) << 31);

constexpr int64_t MIN_UNIT_ROWS = 2;    // with fewer rows, the matrix unit is slower if the weights are in the cache
constexpr int64_t PANEL_AHEAD = 4096;   // prefetch distance in bytes
constexpr int FEW_ROWS = 8;             // a tile of up to this number of rows is usually the only tile of its panel

inline int64_t padded_depth(int64_t in_size) { return round_up(in_size, UNIT_BYTES); }

struct Product8Operands {
    ProductOperands plain;  // the weight is packed in panels of bytes
    const float* scales;    // [O padded to whole panels]
    int8_t* rounded;        // scratch: `rows` lines as described by Rounded
};

// Data after the bytes of a rounded row.
struct RowFacts {
    float scale;
    int32_t offset;  // -128 times the sum of its bytes
};

// Calls round(row) for all rows, distributed over the threads, and waits until all rows are done. If there is a single
// row, every thread rounds it into its own memory, because waiting would take as long. `lines` then points to this
// memory.
template <class Round>
inline void round_rows(ThreadGroup& threads, int64_t rows, int64_t stride, int8_t*& lines, const Round& round) {
    if (rows == 1) {
        thread_local std::vector<int8_t> own;
        if (int64_t(own.size()) < stride) own.resize(stride);
        lines = own.data();
        return round(0);
    }
    threads.share(rows, round);
    threads.barrier();
}

// Rows of x in 8 bits. A row's bytes, padded to whole steps, are followed by a cache line with its RowFacts. Because of
// this line, rows of 4 KiB do not evict each other from the cache.
struct Rounded {
    int8_t* bytes;
    int64_t depth;  // padded to whole steps

    explicit Rounded(const Product8Operands& o) : bytes(o.rounded), depth(padded_depth(o.plain.in_size)) {}
    int64_t stride() const { return depth + UNIT_BYTES; }
    int8_t* row(int64_t row) const { return bytes + row * stride(); }
    RowFacts& facts(int64_t row) const { return *reinterpret_cast<RowFacts*>(this->row(row) + depth); }
};

inline uint16_t magnitude(BFloat16 x) { return x.bits & 0x7fffu; }
inline uint32_t magnitude(float x) { return cast<uint32_t>(x) & 0x7fffffffu; }
inline float of_magnitude(uint16_t bits) { return widen(BFloat16{bits}); }
inline float of_magnitude(uint32_t bits) { return cast<float>(bits); }

// Returns the factor that scales a row with the largest magnitude `most` to 127; 0 if the factor is not finite.
inline float steps_to(float most) {
    const float steps = 127.0f / most;
    return std::isfinite(steps) ? steps : 0.0f;
}

// Rounds a row, in loops that the compiler vectorises. A NaN counts as larger than all numbers, so that the scale and
// the results of the whole row become NaN.
template <class T>
inline RowFacts round_row(const T* __restrict x, int64_t size, int8_t* __restrict bytes) {
    auto top = magnitude(T{});
    for (int64_t k = 0; k < size; k++) top = std::max(top, magnitude(x[k]));
    float most = of_magnitude(top);
    const float steps = steps_to(most);
    uint32_t total = 0;
    for (int64_t k = 0; k < size; k++) {
        // Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves that integer in the lowest bits.
        const uint32_t bits = cast<uint32_t>(widen(x[k]) * steps + 12582912.0f);
        total += bits;
        bytes[k] = int8_t(bits);
    }
    most = std::isfinite(most) ? most : std::numeric_limits<float>::quiet_NaN();
    // Unsigned, because the sum is meaningless and may overflow if the row has a value that is not finite.
    return {most / 127.0f, int32_t(0u - 128u * (total - uint32_t(size) * 0x4b400000u))};
}

// total + the four products of unsigned a and signed b.
inline Ints dot_quads(Ints total, Words a, Words b) {
#if defined(__AVX512VNNI__)
    return cast<Ints>(_mm512_dpbusd_epi32(cast<__m512i>(total), cast<__m512i>(a), cast<__m512i>(b)));
#else
    for (int shift = 0; shift < 32; shift += 8) {
        const Ints weights = cast<Ints>((a >> shift) & 0xffu);
        const Ints values = cast<Ints>(b << (24 - shift)) >> 24;
        total += weights * values;
    }
    return total;
#endif
}

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__AVX512F__)
// tiles use registers of eight lanes, because the compiler would spill vectors of sixteen lanes to memory
#define PENSTOCK_OCTETS

constexpr int OCTETS = 4;  // registers per panel

inline __m256i octet_of_words(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

// total + the four products of unsigned a and signed b.
inline __m256i dot_quads(__m256i total, __m256i a, __m256i b) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(total, a, b);
#else  // bytes 0 and 2, then 1 and 3, as 32-bit sums: a sum of two products of bytes may exceed 16 bits
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi32(0x00ff00ff)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(total, _mm256_add_epi32(even, odd));
#endif
}

#endif

// sums[row] = x[row] . panel, for the unsigned bytes of the panel.
template <int ROWS>
[[gnu::noinline]] void multiply_tile8(const int8_t* x, int64_t stride, const uint8_t* panel, int64_t depth,
                                      int32_t* sums) {
#if defined(PENSTOCK_OCTETS)
    __m256i parts[ROWS][OCTETS] = {};
    for (int64_t k = 0; k < depth; k += QUAD, panel += PANEL * QUAD) {
        if constexpr (ROWS == 1) {  // a single row waits for memory
            __builtin_prefetch(panel + PANEL_AHEAD);
            __builtin_prefetch(panel + PANEL_AHEAD + LANES * QUAD);
        }
#pragma GCC unroll 4
        for (int i = 0; i < OCTETS; i++)
#pragma GCC unroll 2
            for (int r = 0; r < ROWS; r++) {
                int32_t four;
                std::memcpy(&four, x + r * stride + k, sizeof(four));
                parts[r][i] = dot_quads(parts[r][i], octet_of_words(panel + 32 * i), _mm256_set1_epi32(four));
            }
    }
#else
    Ints parts[ROWS][2] = {};
#pragma GCC unroll 2
    for (int64_t k = 0; k < depth; k += QUAD, panel += PANEL * QUAD) {
        if constexpr (ROWS <= FEW_ROWS) {  // few rows wait for memory
            __builtin_prefetch(panel + PANEL_AHEAD);
            __builtin_prefetch(panel + PANEL_AHEAD + LANES * QUAD);
        }
        Words first, second;
        std::memcpy(&first, panel, sizeof(first));
        std::memcpy(&second, panel + LANES * QUAD, sizeof(second));
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            uint32_t four;
            std::memcpy(&four, x + r * stride + k, sizeof(four));
            const Words values = Words{} + four;
            parts[r][0] = dot_quads(parts[r][0], first, values);
            parts[r][1] = dot_quads(parts[r][1], second, values);
        }
    }
#endif
    std::memcpy(sums, parts, sizeof(parts));
}

// Like `multiply_rows` in product.h.
template <int ROWS = MAX_TILE_ROWS>
inline void multiply_rows8(const int8_t* x, int64_t stride, int64_t height, const uint8_t* panel, int64_t depth,
                           int32_t* sums) {
    if constexpr (ROWS > 0) {
        if (height != ROWS) return multiply_rows8<ROWS - 1>(x, stride, height, panel, depth, sums);
        multiply_tile8<ROWS>(x, stride, panel, depth, sums);
    }
}

inline Floats scaled(const int32_t* sums, const RowFacts& facts, Floats scales) {
    Ints total;
    std::memcpy(&total, sums, sizeof(total));
    return __builtin_convertvector(total + facts.offset, Floats) * (scales * facts.scale);
}

// Rounds the rows. Then calls put(row, panel, sums) for the rows and panels that share(work) gives to this thread.
template <class T, class Share, class Put>
inline void multiply8_over(const Product8Operands& o, ThreadGroup& threads, int64_t rows, const Share& share, const Put& put) {
    Rounded rounded(o);
    const int64_t in_size = o.plain.in_size, steps = rounded.depth / UNIT_BYTES;
    round_rows(threads, rows, rounded.stride(), rounded.bytes, [&](int64_t row) {
        int8_t* bytes = rounded.row(row);
        rounded.facts(row) = round_row(static_cast<const T*>(o.plain.x) + row * o.plain.x_stride, in_size, bytes);
        std::memset(bytes + in_size, 0, rounded.depth - in_size);
    });
    const auto put_scaled = [&o, &put, rounded](int64_t row, int64_t panel, const int32_t* sums) {
        const RowFacts facts = rounded.facts(row);
        const float* scales = o.scales + panel * PANEL;
        put(row, panel, {scaled(sums, facts, load(scales)), scaled(sums + LANES, facts, load(scales + LANES))});
    };
    Finished<int32_t, decltype(put_scaled)> finished(put_scaled);
    MatrixUnit unit;
    share([&](int64_t first, int64_t end, int64_t panel) {
        const uint8_t* weight = static_cast<const uint8_t*>(o.plain.weight) + panel * PANEL * rounded.depth;
        for (int64_t row = first; row < end; row += UNIT_ROWS) {
            const int64_t height = std::min(UNIT_ROWS, end - row);
            if (height >= MIN_UNIT_ROWS && has_matrix_unit())
                unit.multiply<Numbers::BYTES>(factors_of(rounded.row(row), rounded.stride(), weight, steps, first, row, end),
                                              height, true, finished.room(), PANEL, finished);
            else
                in_tiles<MAX_TILE_ROWS>(row, row + height, [&](int64_t from, int64_t count) {
                    multiply_rows8(rounded.row(from), rounded.stride(), count, weight, in_size,
                                   finished.room() + (from - row) * PANEL);
                });
            finished.take(row, height, panel, steps);
        }
    });
}

// Rounds the rows, then calls put(row, panel, sums) for all rows and panels.
template <class T, class Put>
inline void multiply8(const Product8Operands& o, ThreadGroup& threads, int64_t rows, const Put& put) {
    multiply8_over<T>(o, threads, rows, [&](const auto& work) { share_panels(threads, rows, o.plain.out_size, work); }, put);
}

template <class T, class Out>
void product8(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const Product8Operands*>(operands);
    const auto& p = o.plain;
    const T* bias = static_cast<const T*>(p.bias);
    Out* out = static_cast<Out*>(p.out);
    const int64_t out_size = p.out_size;
    multiply8<T>(o, threads, rows_of(p, step), [=](int64_t row, int64_t panel, const Floats (&sums)[2]) {
        store_sums<T, Out>(sums, bias, out + row * out_size, panel * PANEL, out_size);
    });
}

struct Pack8Operands {
    const void* weight;  // [O, I] of T
    uint8_t* packed;
    float* scales;       // [O padded]
    int64_t in_size, out_size;
};

template <class T>
void pack8(const void* operands, const Step&, ThreadGroup& threads) {
    const auto& o = *static_cast<const Pack8Operands*>(operands);
    const int64_t panels = (o.out_size + PANEL - 1) / PANEL, depth = padded_depth(o.in_size);
    for (int64_t panel; (panel = threads.take()) < panels;)
        for (int64_t column = 0; column < PANEL; column++) {
            const int64_t output = panel * PANEL + column;
            uint8_t* to = o.packed + panel * PANEL * depth + column * QUAD;
            const T* weight = static_cast<const T*>(o.weight) + output * o.in_size;
            const int64_t filled = output < o.out_size ? o.in_size : 0;
            float top = 0;
            for (int64_t k = 0; k < filled; k++) top = std::max(top, std::fabs(widen(weight[k])));
            const float steps = steps_to(top);
            o.scales[output] = top / 127.0f;
            for (int64_t k = 0; k < depth; k++) {
                const float value = k < filled ? std::nearbyintf(widen(weight[k]) * steps) : 0.0f;
                to[k / QUAD * PANEL * QUAD + k % QUAD] = uint8_t(int32_t(value) + 128);
            }
        }
}

}  // namespace penstock
