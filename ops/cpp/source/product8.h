// Products in which weights and activations have 8 bits.
//
// A weight [O, I] is w = scale[o] * q, q in -127 .. 127, kept as q + 128 in panels [O / 32][I / 4][32][4]. Each row of
// x is rounded to 8 bits in groups of 64 with a scale of their own, so that one large number costs only its
// neighbours their precision. Products are exact in int32 within a group, and groups are added in float32.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "product.h"

namespace penstock {

typedef int8_t Bytes __attribute__((vector_size(16)));

constexpr int64_t GROUP = 64;
constexpr int QUAD = 4;                             // bytes in a lane
constexpr int MAX_TILE_ROWS8 = (MAX_TILE_ROWS + 1) / 2;  // two kinds of sums each

struct Product8Operands {
    ProductOperands plain;  // its weight in panels of bytes
    const float* scales;    // [O padded to whole panels]
    int8_t* rounded;        // scratch [rows, I]
    float* row_scales;      // scratch [rows, groups]
    int32_t* row_sums;      // scratch [rows, groups]: -128 times the sum of a group
};

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

// To whole numbers, ties to even. Adding 1.5 * 2^23 leaves no bits behind the point.
inline Ints rounded(Floats x) { return cast<Ints>(x + 12582912.0f) - 0x4b400000; }

// One group of a row; its length is a multiple of the lanes unless it is the last one.
template <class T>
inline void round_group(const T* x, int64_t size, int8_t* bytes, float* scale, int32_t* offset) {
    Floats values[GROUP / LANES] = {};
    Floats top{};
    Ints strange{};  // not 0 where there is no number
    for (int64_t k = 0; k < size; k += LANES) {
        Floats& value = values[k / LANES];
        if (k + LANES <= size)
            value = load(x + k);
        else
            for (int64_t lane = 0; lane < size - k; lane++) value[lane] = widen(x[k + lane]);
        top = larger(top, larger(value, -value));
        strange |= value != value;
    }
    float most = largest(top);
    for (int lane = 0; lane < LANES; lane++)
        if (strange[lane] || std::isinf(most)) most = std::numeric_limits<float>::quiet_NaN();  // so is every product
    const float inverse = most > 0 ? 127.0f / most : 0.0f;
    Ints total{};
    for (int64_t k = 0; k < size; k += LANES) {
        const Ints q = rounded(values[k / LANES] * inverse);
        total += q;
        const auto narrow = __builtin_convertvector(q, Bytes);
        std::memcpy(bytes + k, &narrow, std::min<int64_t>(LANES, size - k));
    }
    int32_t count = 0;
    for (int lane = 0; lane < LANES; lane++) count += total[lane];
    *scale = most / 127.0f;
    *offset = -128 * count;
}

template <int ROWS>
inline void multiply_tile8(const Product8Operands& o, int64_t row, const uint8_t* panel, Floats (&sums)[ROWS][2]) {
    const int64_t depth = o.plain.in_size, groups = (depth + GROUP - 1) / GROUP;
    const int8_t* x = o.rounded + row * depth;
    for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = Floats{};
    for (int64_t g = 0; g < groups; g++) {
        Ints parts[ROWS][2];
        for (int r = 0; r < ROWS; r++) parts[r][0] = parts[r][1] = Ints{} + o.row_sums[(row + r) * groups + g];
        const int64_t end = std::min((g + 1) * GROUP, depth);
#pragma GCC unroll 2
        for (int64_t k = g * GROUP; k < end; k += QUAD, panel += PANEL * QUAD) {
            Words first, second;
            std::memcpy(&first, panel, sizeof(first));
            std::memcpy(&second, panel + LANES * QUAD, sizeof(second));
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                uint32_t four;
                std::memcpy(&four, x + r * depth + k, sizeof(four));
                const Words values = Words{} + four;
                parts[r][0] = dot_quads(parts[r][0], first, values);
                parts[r][1] = dot_quads(parts[r][1], second, values);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            const Floats scale = fill(o.row_scales[(row + r) * groups + g]);
            sums[r][0] += __builtin_convertvector(parts[r][0], Floats) * scale;
            sums[r][1] += __builtin_convertvector(parts[r][1], Floats) * scale;
        }
    }
}

// As in product.h.
template <int ROWS = MAX_TILE_ROWS8, class Put>
inline void multiply_rows8(const Product8Operands& o, int64_t row, int64_t height, int64_t panel, const Put& put) {
    if constexpr (ROWS > 0) {
        if (height != ROWS) return multiply_rows8<ROWS - 1>(o, row, height, panel, put);
        Floats sums[ROWS][2];
        const auto* weight = static_cast<const uint8_t*>(o.plain.weight) + panel * PANEL * o.plain.in_size;
        multiply_tile8<ROWS>(o, row, weight, sums);
        const Floats first = load(o.scales + panel * PANEL), second = load(o.scales + panel * PANEL + LANES);
        for (int r = 0; r < ROWS; r++) {
            sums[r][0] *= first;
            sums[r][1] *= second;
            put(row + r, sums[r]);
        }
    }
}

// Rounds the rows, then calls put(row, panel, sums) for all rows and panels.
template <class T, class Put>
inline void multiply8(const Product8Operands& o, Team& team, int64_t rows, const Put& put) {
    const int64_t depth = o.plain.in_size, groups = (depth + GROUP - 1) / GROUP;
    for (int64_t row; (row = team.take()) < rows;)
        for (int64_t g = 0; g < groups; g++)
            round_group(static_cast<const T*>(o.plain.x) + row * o.plain.x_stride + g * GROUP,
                        std::min(GROUP, depth - g * GROUP), o.rounded + row * depth + g * GROUP,
                        o.row_scales + row * groups + g, o.row_sums + row * groups + g);
    team.barrier();
    share_panels(team, rows, o.plain.out_size, [&](int64_t first, int64_t end, int64_t panel) {
        in_tiles<MAX_TILE_ROWS8>(first, end, [&](int64_t row, int64_t height) {
            multiply_rows8(o, row, height, panel, [&](int64_t r, const Floats (&sums)[2]) { put(r, panel, sums); });
        });
    });
}

template <class T, class Out>
void product8(const void* operands, const Step& step, Team& team) {
    const auto& o = *static_cast<const Product8Operands*>(operands);
    const auto& p = o.plain;
    multiply8<T>(o, team, rows_of(p, step), [&](int64_t row, int64_t panel, const Floats (&sums)[2]) {
        store_sums<T, Out>(sums, static_cast<const T*>(p.bias), static_cast<Out*>(p.out) + row * p.out_size,
                           panel * PANEL, p.out_size);
    });
}

struct Pack8Operands {
    const void* weight;  // [O, I] of T
    uint8_t* panels;
    float* scales;       // [O padded]
    int64_t in_size, out_size;
};

template <class T>
void pack8(const void* operands, const Step&, Team& team) {
    const auto& o = *static_cast<const Pack8Operands*>(operands);
    const int64_t panels = (o.out_size + PANEL - 1) / PANEL;
    for (int64_t panel; (panel = team.take()) < panels;)
        for (int64_t column = 0; column < PANEL; column++) {
            const int64_t output = panel * PANEL + column;
            uint8_t* to = o.panels + panel * PANEL * o.in_size + column * QUAD;
            const T* weight = output < o.out_size ? static_cast<const T*>(o.weight) + output * o.in_size : nullptr;
            float top = 0;
            for (int64_t k = 0; weight && k < o.in_size; k++) top = std::max(top, std::fabs(widen(weight[k])));
            const float inverse = top > 0 ? 127.0f / top : 0.0f;
            o.scales[output] = top / 127.0f;
            for (int64_t k = 0; k < o.in_size; k++) {
                const float value = weight ? std::nearbyintf(widen(weight[k]) * inverse) : 0.0f;
                to[k / QUAD * PANEL * QUAD + k % QUAD] = uint8_t(int32_t(value) + 128);
            }
        }
}

}  // namespace penstock
