// Products with 4-bit weights, which are decoded in registers.
//
// A weight [O, I] is w = table[code] * scale[o, group] + shift[o, group], for groups of adjacent inputs. The table has
// any sixteen numbers. A panel of 32 outputs is one stream. For each group it has 32 scales, 32 shifts if there are
// any, and the codes: [group / 8][32] words of eight inputs. A word has the code of input 0 in its lowest four bits,
// input 1 from bit 16, input 2 from bit 4, input 3 from bit 20, and so on. After a shift by a multiple of 4, both
// halves of a word begin with the codes of two adjacent inputs, which one instruction looks up.
//
// product4_wide.h has the layout of codes of 5, 6 and 8 bits, which are integers.
//
// The products of a group's inputs with the table's numbers are summed separately, and the sum is scaled once. The
// order is the same for any number of rows, so a token's result does not depend on its batch.
//
// If the table has 8-bit integers, each row of x may be rounded to 8 bits with its own scale. Then the products of a
// group are summed exactly in int32, four per instruction, and converted to float once.
#pragma once

#include <vector>

#include "float8.h"
#include "product.h"
#include "product8.h"

namespace penstock {

constexpr int64_t WORD_CODES = 8;
constexpr uint32_t BYTE_CODES = 0x0f0f0f0fu;  // the codes in the lower half of each byte

struct Product4Operands {
    ProductOperands plain;  // the weight is packed in panels as described above
    const float* table;     // [16]
    float* group_sums;      // scratch [rows, I / group]: sums of x, if there are shifts
    int64_t group;          // inputs per group, a multiple of 8
    int64_t shifted;        // whether groups have shifts
    int8_t* rounded;        // scratch: `rows` lines as described by Rounded4; null: x is not rounded
    int64_t bits;           // bits per code: 4; or 5, 6 or 8 (product4_wide.h), without a table
};

// A 16-bit float, the type of scales if x is bfloat16.
struct Half {
    uint16_t bits;
};

inline Floats load(const Half* from) {
    Shorts halves;
    std::memcpy(&halves, from, sizeof(halves));
    return widen_halves(halves);
}

// Rounds a float to a 16-bit float, to nearest, ties to even. Its magnitude must be in the range of 16-bit floats.
inline Half to_half(float x) {
    const uint32_t sign = cast<uint32_t>(x) >> 16 & 0x8000u;
    const float magnitude = std::fabs(x);
    if (magnitude < 0x1p-14f) return {uint16_t(sign | uint32_t(std::nearbyintf(magnitude * 0x1p24f)))};
    const uint32_t bits = cast<uint32_t>(magnitude), rounded = bits + 0xfffu + (bits >> 13 & 1u);
    return {uint16_t(sign | ((rounded >> 13) - (112u << 10)))};
}

template <class T>
struct ScaleOf {
    typedef float Type;
};
template <>
struct ScaleOf<BFloat16> {
    typedef Half Type;
};

inline void put_scale(float* to, float scale) { *to = scale; }
inline void put_scale(Half* to, float scale) { *to = to_half(scale); }

inline float get_scale(const float* from) { return *from; }
inline float get_scale(const Half* from) { return widen_halves(Shorts{} + from->bits)[0]; }

// The sixteen numbers of the table.
struct Table {
    Floats numbers;
    Words pairs;  // the numbers in bfloat16, twice, so that the bit above a code has no effect

    explicit Table(const float* from) : numbers(load(from)) {
        uint16_t halves[32];
        for (int i = 0; i < 32; i++) halves[i] = uint16_t(round_to_bfloat16(numbers)[i % 16]);
        std::memcpy(&pairs, halves, sizeof(pairs));
    }

    // Returns the numbers of the codes in the four lowest bits of each lane.
    Floats look_up(Words codes) const {
#if defined(__AVX512F__)
        return cast<Floats>(_mm512_permutexvar_ps(cast<__m512i>(codes), cast<__m512>(numbers)));
#elif defined(__AVX2__)
        __m256 table[2], found[2];
        __m256i index[2];
        std::memcpy(table, &numbers, sizeof(table));
        std::memcpy(index, &codes, sizeof(index));
        for (int half = 0; half < 2; half++) {  // eight numbers at a time; bit 3 of the code selects the half
            const __m256 low = _mm256_permutevar8x32_ps(table[0], index[half]);
            const __m256 high = _mm256_permutevar8x32_ps(table[1], index[half]);
            found[half] = _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index[half], 28)));
        }
        return cast<Floats>(found);
#else
        return __builtin_shuffle(numbers, cast<Ints>(codes & 15u));
#endif
    }
};

// Returns numbers n .. n + LANE_SIZE - 1 of the eight numbers of each word, in the layout of a lane in products.
inline Floats decode(const Table& table, Words codes, int n, float) {
    return table.look_up(codes >> (4 * (n / 2) + 16 * (n % 2)));
}

inline Words decode(const Table& table, Words codes, int n, BFloat16) {
#if defined(__AVX512BW__)
    return cast<Words>(_mm512_permutexvar_epi16(cast<__m512i>(codes >> (2 * n)), cast<__m512i>(table.pairs)));
#else
    const Words low = cast<Words>(table.look_up(codes >> (2 * n)));
    const Words high = cast<Words>(table.look_up(codes >> (2 * n + 16)));
    // Rounds to bfloat16, which is exact for the tables of known formats.
    const Words rounding = Words{} + 0x8000u;
    return ((low + rounding) >> 16) | ((high + rounding) & 0xffff0000u);
#endif
}

// a * b + c, rounded once. Without it, the compiler would decide for each number of rows whether to fuse.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return cast<Floats>(_mm512_fmadd_ps(cast<__m512>(a), cast<__m512>(b), cast<__m512>(c)));
#else
    for (int lane = 0; lane < LANES; lane++) a[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return a;
#endif
}

// Maximum number of rows of a tile whose sums per group and total sums all fit in registers. Groups are short, so that
// both are often used.
constexpr int MAX_GROUPED_ROWS = std::min(MAX_TILE_ROWS, 7);

template <class T>
inline int64_t panel_bytes4(int64_t in_size, int64_t group, int64_t shifted, int64_t bits) {
    return in_size / group * (1 + shifted) * PANEL * int64_t(sizeof(typename ScaleOf<T>::Type)) + in_size * PANEL / 8 * bits;
}

// sums[row] = x[row] . panel.
template <class T, int ROWS>
[[gnu::noinline]] void multiply_tile4(const Product4Operands& o, const Table& table, int64_t row,
                                      const uint8_t* panel, Floats (*sums)[2]) {
    typedef typename ScaleOf<T>::Type Scale;
    constexpr int N = LANE_SIZE<T>;
    constexpr int64_t STEP = PANEL * sizeof(uint32_t);
    const int64_t groups = o.plain.in_size / o.group, stride = o.plain.x_stride;
    const T* x = static_cast<const T*>(o.plain.x) + row * stride;
    for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = Floats{};
    for (int64_t g = 0; g < groups; g++, x += o.group) {
        const Scale* scales = reinterpret_cast<const Scale*>(panel);
        panel += (1 + o.shifted) * PANEL * sizeof(Scale);
        Floats parts[ROWS][2];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) parts[r][0] = parts[r][1] = Floats{};
        for (int64_t k = 0; k < o.group; k += WORD_CODES, panel += STEP) {
            if constexpr (ROWS == 1) {  // a single row waits for memory
                __builtin_prefetch(panel + PANEL_AHEAD);
                __builtin_prefetch(panel + PANEL_AHEAD + STEP / 2);
            }
            Words first, second;
            std::memcpy(&first, panel, sizeof(first));
            std::memcpy(&second, panel + STEP / 2, sizeof(second));
#pragma GCC unroll 8
            for (int n = 0; n < WORD_CODES; n += N) {
                const auto a = decode(table, first, n, T{}), b = decode(table, second, n, T{});
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    const auto value = fill_lanes(x + r * stride + k + n);
                    parts[r][0] = multiply_add(parts[r][0], a, value);
                    parts[r][1] = multiply_add(parts[r][1], b, value);
                }
            }
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const Floats scale = load(scales + half * LANES);
            const Floats shift = o.shifted ? load(scales + PANEL + half * LANES) : Floats{};
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                sums[r][half] = fused(parts[r][half], scale, sums[r][half]);
                if (o.shifted) sums[r][half] = fused(shift, fill(o.group_sums[(row + r) * groups + g]), sums[r][half]);
            }
        }
    }
}

}  // namespace penstock

#include "product4_rounded.h"  // uses the definitions above
#include "product4_decoded.h"

namespace penstock {

template <class T, int ROWS = MAX_UNDECODED<T, 4>>
inline void multiply_rows4(const Product4Operands& o, const Table& table, int64_t row, int64_t height,
                           const uint8_t* panel, Floats (*sums)[2]) {
    if constexpr (ROWS > 0) {
        if (height != ROWS) return multiply_rows4<T, ROWS - 1>(o, table, row, height, panel, sums);
#if defined(PENSTOCK_OCTETS)
        multiply_octets4<T, ROWS>(o, table, row, panel, sums);
#else
        multiply_tile4<T, ROWS>(o, table, row, panel, sums);
#endif
    }
}

// If the operands require it, rounds the rows or sums their groups for the shifts. Then calls put(row, panel, sums) for
// the rows and panels that share(work) gives to this thread.
template <class T, class Share, class Put>
inline void multiply4_over(const Product4Operands& o, ThreadGroup& team, int64_t rows, const Share& share, const Put& put) {
    const int64_t bytes = panel_bytes4<T>(o.plain.in_size, o.group, o.shifted, o.bits);
    if (o.rounded) {
        Rounded4 rounded(o);
        round_rows(team, rows, rounded.stride(), rounded.lines, [&](int64_t row) {
            rounded.round(row, static_cast<const T*>(o.plain.x) + row * o.plain.x_stride);
        });
        const ByteTable table(o.table);
        return share([&](int64_t first, int64_t end, int64_t panel) {
            const uint8_t* weight = static_cast<const uint8_t*>(o.plain.weight) + panel * bytes;
            const Words* const numbers = decode_bytes4<T>(o, table, weight, end - first);
            const auto multiply_tile = [&](int64_t row, int64_t height) {
                Floats sums[MAX_TILE_ROWS][2];
                multiply_rounded_rows4<T>(o, table, rounded, row, height, weight, numbers, sums);
                for (int64_t r = 0; r < height; r++) put(row + r, panel, sums[r]);
            };
            if (numbers)
                in_tiles<MAX_GROUPED_ROWS>(first, end, multiply_tile);
            else
                in_tiles<MAX_ROUNDED_UNDECODED>(first, end, multiply_tile);
        });
    }
    if (o.shifted) {
        const int64_t groups = o.plain.in_size / o.group;
        team.share(rows, [&](int64_t row) {
            const T* x = static_cast<const T*>(o.plain.x) + row * o.plain.x_stride;
            for (int64_t g = 0; g < groups; g++) {
                Floats total{};
                in_vectors(o.group, [&](int64_t k, int64_t count) { total += load(x + g * o.group + k, count); });
                o.group_sums[row * groups + g] = sum(total);
            }
        });
        team.barrier();
    }
    const Table table(o.table);
    with_codes(o.bits, [&]<int BITS>(Codes<BITS>) {
        share([&](int64_t first, int64_t end, int64_t panel) {
            const uint8_t* weight = static_cast<const uint8_t*>(o.plain.weight) + panel * bytes;
            const auto put_tile = [&](int64_t row, int64_t height, const auto& multiply) {
                Floats sums[MAX_TILE_ROWS][2];
                multiply(sums);
                for (int64_t r = 0; r < height; r++) put(row + r, panel, sums[r]);
            };
            if constexpr (IN_PAIRS<T>)
                if (end - first > MAX_UNDECODED<T, BITS>) {
                    const Words* const numbers = decode_pairs<T, BITS>(o, table, weight);
                    return in_tiles<MAX_PAIRS_ROWS>(first, end, [&](int64_t row, int64_t height) {
                        put_tile(row, height, [&](Floats (*sums)[2]) {
                            multiply_rows_pairs<T, BITS>(o, row, height, weight, numbers, sums);
                        });
                    });
                }
            in_tiles<MAX_UNDECODED<T, BITS>>(first, end, [&](int64_t row, int64_t height) {
                put_tile(row, height, [&](Floats (*sums)[2]) {
                    if constexpr (BITS == 4)
                        multiply_rows4<T>(o, table, row, height, weight, sums);
                    else
                        multiply_rows_codes<T, BITS>(o, row, height, weight, sums);
                });
            });
        });
    });
}

// Calls put(row, panel, sums) for all rows and panels.
template <class T, class Put>
inline void multiply4(const Product4Operands& o, ThreadGroup& team, int64_t rows, const Put& put) {
    multiply4_over<T>(o, team, rows, [&](const auto& work) { share_panels(team, rows, o.plain.out_size, work); }, put);
}

template <class T, class Out>
void product4(const void* operands, const Step& step, ThreadGroup& team) {
    const auto& o = *static_cast<const Product4Operands*>(operands);
    const auto& p = o.plain;
    multiply4<T>(o, team, rows_of(p, step), [&p](int64_t row, int64_t panel, const Floats (&sums)[2]) {
        store_sums<T, Out>(sums, static_cast<const T*>(p.bias), static_cast<Out*>(p.out) + row * p.out_size,
                           panel * PANEL, p.out_size);
    });
}

struct Pack4Operands {
    const uint8_t* codes;  // [O, I], one code per byte
    const float* scales;   // [O, I / group]
    const float* shifts;   // [O, I / group], or null
    uint8_t* packed;       // the panel of the first output
    int64_t in_size, out_size, group, bits;
};

template <class T>
void pack4(const void* operands, const Step&, ThreadGroup& team) {
    typedef typename ScaleOf<T>::Type Scale;
    const auto& o = *static_cast<const Pack4Operands*>(operands);
    const int64_t panels = (o.out_size + PANEL - 1) / PANEL, groups = o.in_size / o.group, shifted = o.shifts != nullptr;
    const int64_t bytes = panel_bytes4<T>(o.in_size, o.group, shifted, o.bits);
    const auto pack_codes = [&](auto code, uint8_t* to, const uint8_t* codes, int64_t column) {
        for (int64_t k = 0; k < o.group; k += WORD_CODES) {
            uint64_t eight;
            std::memcpy(&eight, codes + k, sizeof(eight));
            code.put(to, k, column, Rounded4::spread(eight) | Rounded4::spread(eight >> 32) << 8);
        }
    };
    for (int64_t panel; (panel = team.take()) < panels;) {
        uint8_t* to = o.packed + panel * bytes;
        std::memset(to, 0, bytes);  // zeros after the last output
        const int64_t filled = std::min<int64_t>(PANEL, o.out_size - panel * PANEL);
        for (int64_t g = 0; g < groups; g++, to += o.group * PANEL / 8 * o.bits) {
            Scale* scales = reinterpret_cast<Scale*>(to);
            to += (1 + shifted) * PANEL * sizeof(Scale);
            for (int64_t column = 0; column < filled; column++) {
                const int64_t output = panel * PANEL + column;
                put_scale(scales + column, o.scales[output * groups + g]);
                if (shifted) put_scale(scales + PANEL + column, o.shifts[output * groups + g]);
                const uint8_t* codes = o.codes + output * o.in_size + g * o.group;
                with_codes(o.bits, [&](auto code) { pack_codes(code, to, codes, column); });
            }
        }
    }
}

}  // namespace penstock
