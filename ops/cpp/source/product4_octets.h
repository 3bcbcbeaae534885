// Tiles of products with 4-bit weights (product4.h) for processors with AVX2, in registers of eight lanes. The compiler
// would split vectors of sixteen lanes and spill them to memory.
#pragma once

#include "product8.h"

#if defined(PENSTOCK_OCTETS)

namespace penstock {

inline __m256 octet(const float* from) { return _mm256_loadu_ps(from); }
inline __m256 octet(const Half* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// The sixteen numbers of a table, in the type T.
struct OctetTable {
    __m256 low, high;

    OctetTable(const Table& table, float) : OctetTable(table.numbers) {}
    OctetTable(const Table& table, BFloat16) : OctetTable(widen(round_to_bfloat16(table.numbers))) {}
    explicit OctetTable(Floats numbers) {
        float held[LANES];
        store(held, numbers);
        low = octet(held);
        high = octet(held + 8);
    }

    // Returns the numbers of the codes in the four lowest bits of each lane. Bit 3 selects the half of the table.
    __m256 look_up(__m256i codes) const {
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, codes), _mm256_permutevar8x32_ps(high, codes),
                                _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
    }
};

// Like multiply_tile4.
template <class T, int ROWS>
[[gnu::noinline]] void multiply_octets4(const Product4Operands& o, const Table& given, int64_t row, const uint8_t* panel,
                                        Floats (*result)[2]) {
    typedef typename ScaleOf<T>::Type Scale;
    const OctetTable table(given, T{});
    const int64_t groups = o.plain.in_size / o.group, stride = o.plain.x_stride;
    const T* x = static_cast<const T*>(o.plain.x) + row * stride;
    __m256 sums[ROWS][OCTETS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS * OCTETS; i++) sums[i / OCTETS][i % OCTETS] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        const Scale* scales = reinterpret_cast<const Scale*>(panel);
        panel += (1 + o.shifted) * PANEL * sizeof(Scale);
        __m256 parts[ROWS][OCTETS];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS * OCTETS; i++) parts[i / OCTETS][i % OCTETS] = _mm256_setzero_ps();
        for (int64_t k = 0; k < o.group; k += WORD_CODES, x += WORD_CODES, panel += PANEL * sizeof(uint32_t)) {
            __builtin_prefetch(panel + PANEL_AHEAD);
            __builtin_prefetch(panel + PANEL_AHEAD + 64);
#pragma GCC unroll 8
            for (int n = 0; n < WORD_CODES; n++)
#pragma GCC unroll 4
                for (int i = 0; i < OCTETS; i++) {
                    const __m256i codes = octet_of_words(panel + i * sizeof(__m256i));
                    const __m256 numbers = table.look_up(_mm256_srli_epi32(codes, 4 * (n / 2) + 16 * (n % 2)));
#pragma GCC unroll 2
                    for (int r = 0; r < ROWS; r++)
                        parts[r][i] = _mm256_fmadd_ps(numbers, _mm256_set1_ps(widen(x[r * stride + n])), parts[r][i]);
                }
        }
#pragma GCC unroll 4
        for (int i = 0; i < OCTETS; i++)
#pragma GCC unroll 2
            for (int r = 0; r < ROWS; r++) {
                sums[r][i] = _mm256_fmadd_ps(parts[r][i], octet(scales + 8 * i), sums[r][i]);
                if (o.shifted)
                    sums[r][i] = _mm256_fmadd_ps(octet(scales + PANEL + 8 * i),
                                                 _mm256_set1_ps(o.group_sums[(row + r) * groups + g]), sums[r][i]);
            }
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < OCTETS; i++) std::memcpy(reinterpret_cast<char*>(result[r]) + 32 * i, &sums[r][i], 32);
}

// Like multiply_rounded4.
template <class T, int ROWS, bool DECODED>
[[gnu::noinline]] void multiply_rounded_octets4(const Product4Operands& o, const ByteTable& table,
                                                const Rounded4& rounded, int64_t row, const uint8_t* panel,
                                                const Words* decoded, Floats (*result)[2]) {
    typedef typename ScaleOf<T>::Type Scale;
    const __m256i numbers = octet_of_words(table.numbers), nibbles = _mm256_set1_epi8(15);
    const int64_t stride = rounded.stride();
    const int8_t* x = rounded.row(row);
    __m256 sums[ROWS][OCTETS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS * OCTETS; i++) sums[i / OCTETS][i % OCTETS] = _mm256_setzero_ps();
    for (int64_t g = 0; g < rounded.groups(); g++) {
        const Scale* scales = reinterpret_cast<const Scale*>(panel);
        panel += (1 + o.shifted) * PANEL * sizeof(Scale);
        __m256i parts[ROWS][OCTETS];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS * OCTETS; i++)
            parts[i / OCTETS][i % OCTETS] = _mm256_set1_epi32(rounded.offsets(row + i / OCTETS)[g]);
        for (int64_t k = 0; k < o.group; k += WORD_CODES, panel += PANEL * sizeof(uint32_t)) {
            if constexpr (!DECODED) {
                __builtin_prefetch(panel + PANEL_AHEAD);
                __builtin_prefetch(panel + PANEL_AHEAD + 64);
            }
#pragma GCC unroll 2
            for (int shift = 0; shift < 8; shift += 4, decoded += 2, x += QUAD)
#pragma GCC unroll 4
                for (int i = 0; i < OCTETS; i++) {
                    __m256i bytes;
                    if constexpr (DECODED)
                        bytes = octet_of_words(reinterpret_cast<const char*>(decoded) + 32 * i);
                    else
                        bytes = _mm256_shuffle_epi8(
                            numbers, _mm256_and_si256(_mm256_srli_epi32(octet_of_words(panel + 32 * i), shift), nibbles));
#pragma GCC unroll 2
                    for (int r = 0; r < ROWS; r++) {
                        int32_t four;
                        std::memcpy(&four, x + r * stride, sizeof(four));
                        parts[r][i] = dot_quads(parts[r][i], bytes, _mm256_set1_epi32(four));
                    }
                }
        }
#pragma GCC unroll 4
        for (int i = 0; i < OCTETS; i++)
#pragma GCC unroll 2
            for (int r = 0; r < ROWS; r++) {
                sums[r][i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(parts[r][i]), octet(scales + 8 * i), sums[r][i]);
                if (o.shifted)
                    sums[r][i] = _mm256_fmadd_ps(octet(scales + PANEL + 8 * i),
                                                 _mm256_set1_ps(float(rounded.offsets(row + r)[g] / -128)), sums[r][i]);
            }
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < OCTETS; i++) {
            const __m256 scaled = _mm256_mul_ps(sums[r][i], _mm256_set1_ps(rounded.scale(row + r)));
            std::memcpy(reinterpret_cast<char*>(result[r]) + 32 * i, &scaled, 32);
        }
}

}  // namespace penstock

#endif
