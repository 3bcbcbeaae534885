// Attention of a few queries over one block of keys, for decode rows and prompts.
//
// A query's result depends only on its row. Each block of keys, counted from position 0, has its own softmax (`weigh`),
// and blocks are merged in order (`merge`). Sums have a fixed order for any set of queries and any thread.
#pragma once

#include "attend_dots.h"

namespace penstock {

constexpr int64_t KEY_BLOCK = 256;  // keys per block; sums are divided at its multiples, so it affects the last bits
constexpr int WEIGHED_AT_ONCE = 4;  // vectors of scores per pass
constexpr float NO_SCORE = -1e30f;  // the largest score of no keys; finite, so that differences are not NaN
constexpr float LOG2_E = 1.44269504088896341f;

typedef uint32_t Four __attribute__((vector_size(16)));
typedef uint32_t Eight __attribute__((vector_size(32)));
typedef uint16_t EightShorts __attribute__((vector_size(16)));

// Loads 8 words.
template <class T>
inline Eight words_of(const T* from) {
    if constexpr (std::is_same_v<T, BFloat16> && PER_WORD<T> == 1) {
        EightShorts halves;
        std::memcpy(&halves, from, sizeof(halves));
        return __builtin_convertvector(halves, Eight) << 16;
    }
    Eight x;
    std::memcpy(&x, from, sizeof(x));
    return x;
}

// Interleaves 16 keys of D elements, `stride` elements apart: word w of key i goes to packed[w * 16 + i]. If `ahead` is
// not null, it also prefetches 16 keys from there. The prefetches are spread over the loop, because the processor
// supports only few outstanding loads.
template <class T>
inline void pack_keys(const T* keys, int64_t stride, int64_t head_dim, uint32_t* packed, const T* ahead) {
    constexpr int64_t STEP = 8 * PER_WORD<T>;
    for (int64_t d = 0; d < head_dim; d += STEP, packed += 8 * LANES) {
        if (ahead) fetch(ahead + d * LANES, STEP * LANES);
#if defined(__AVX512F__)
        __m512i a[8], b[8];
        for (int i = 0; i < 8; i++) {  // interleaves keys 0 and 4, 1 and 5, .. 8 and 12, ..
            const T* const key = keys + (i + (i & 4)) * stride + d;
            a[i] = _mm512_inserti64x4(_mm512_castsi256_si512(cast<__m256i>(words_of(key))),
                                      cast<__m256i>(words_of(key + 4 * stride)), 1);
        }
        for (int i = 0; i < 8; i += 2) {
            b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) {
            a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
            a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
            a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
            a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
        }
        for (int i = 0; i < 4; i++) {
            store_words(packed + i * LANES, cast<Words>(_mm512_shuffle_i32x4(a[i], a[4 + i], 0x88)));
            store_words(packed + (4 + i) * LANES, cast<Words>(_mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd)));
        }
#else
        for (int i = 0; i < LANES; i += 4) {
            Four halves[2][4];
            for (int k = 0; k < 4; k++) {
                const Eight x = words_of(keys + (i + k) * stride + d);
                halves[0][k] = Four{x[0], x[1], x[2], x[3]}, halves[1][k] = Four{x[4], x[5], x[6], x[7]};
            }
            for (int half = 0; half < 2; half++) {
                const Four(&x)[4] = halves[half];
                const Four a = __builtin_shuffle(x[0], x[1], Four{0, 4, 1, 5});
                const Four b = __builtin_shuffle(x[0], x[1], Four{2, 6, 3, 7});
                const Four c = __builtin_shuffle(x[2], x[3], Four{0, 4, 1, 5});
                const Four e = __builtin_shuffle(x[2], x[3], Four{2, 6, 3, 7});
                const Four columns[] = {
                    __builtin_shuffle(a, c, Four{0, 1, 4, 5}), __builtin_shuffle(a, c, Four{2, 3, 6, 7}),
                    __builtin_shuffle(b, e, Four{0, 1, 4, 5}), __builtin_shuffle(b, e, Four{2, 3, 6, 7})};
                for (int k = 0; k < 4; k++)
                    std::memcpy(packed + (4 * half + k) * LANES + i, &columns[k], sizeof(Four));
            }
        }
#endif
    }
}

// Packs 16 values to [16 / PER_WORD, D]. A lane has the values that are multiplied by one word of weights.
template <class T>
inline void pack_values(const T* values, int64_t stride, int64_t head_dim, uint32_t* packed, const T* ahead) {
    for (int key = 0; key < LANES; key += PER_WORD<T>, packed += head_dim) {
        const T *const first = values + key * stride, *const second = first + stride;
        if (ahead) fetch(ahead + key * head_dim, PER_WORD<T> * head_dim);
        int64_t d = 0;
#if defined(__AVX512BF16__)
        if constexpr (PER_WORD<T> == 2) {
            const Words lanes = Words{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * 0x10001u + 0x200000u;
            const __m512i low = cast<__m512i>(lanes), high = cast<__m512i>(lanes + 0x100010u);
            for (; d + 32 <= head_dim; d += 32) {
                const __m512i a = cast<__m512i>(load_pairs(first + d)), b = cast<__m512i>(load_pairs(second + d));
                store_words(packed + d, cast<Words>(_mm512_permutex2var_epi16(a, low, b)));
                store_words(packed + d + LANES, cast<Words>(_mm512_permutex2var_epi16(a, high, b)));
            }
        }
#endif
        for (; d < head_dim; d += LANES) {
            Words x = cast<Words>(load(first + d));
            if constexpr (PER_WORD<T> == 2) x = (x >> 16) | cast<Words>(load(second + d));
            store_words(packed + d, x);
        }
    }
}

// Hyperbolic tangent, with an absolute error of about 1e-7.
inline Floats tangent(Floats x) {
    const Floats size = x < 0.0f ? -x : x;
    const Floats decay = power_of_two(size * (-2.0f * LOG2_E));
    const Floats far = (1.0f - decay) / (1.0f + decay);
    const Floats square = x * x;
    const Floats near = size * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15)));
    const Floats found = size < 0.125f ? near : far;
    return x < 0.0f ? -found : found;
}

// Parameters that convert products of queries and keys to the softmax's exponents of 2.
struct Scoring {
    float factor;   // factor of the products without a soft cap
    float inverse;  // factor before tanh, with a soft cap
    float cap;      // factor after tanh; 0: no soft cap

    Floats operator()(Floats products) const {
        return cap == 0 ? products * factor : tangent(products * inverse) * cap;
    }
};

inline Floats hide_outside(Floats x, int64_t lane_0, int64_t low, int64_t high) {
    const Ints lane = Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + int32_t(lane_0);
    const Ints hidden = (lane < int32_t(low)) | (lane >= int32_t(high));
    return hidden ? fill(-__builtin_inff()) : x;
}

struct Mass {
    float largest;  // largest score
    float total;    // sum of the weights
};

// `top_score` and `weigh_below` are the two halves of `weigh`. With many queries, the first half runs for all queries
// before the second half, to hide latency.
template <bool CAPPED>
inline float top_score(float* scores, const Scoring& scoring, int64_t low, int64_t high) {
    Floats largest_of = fill(CAPPED ? NO_SCORE : NO_SCORE / scoring.factor);
    for (int64_t i = low / LANES * LANES; low < high && i < high; i += LANES) {
        Floats x = load(scores + i);
        if (CAPPED) x = scoring(x);
        if (i < low || i + LANES > high) x = hide_outside(x, i, low, high);
        if (CAPPED || i < low || i + LANES > high) store(scores + i, x);
        largest_of = larger(x, largest_of);
    }
    return largest(largest_of) * (CAPPED ? 1.0f : scoring.factor);
}

// SHORT: weights have a relative error of at most 1e-4, because they are rounded to bfloat16.
template <bool CAPPED, bool SHORT = false, class Weight>
inline float weigh_below(float top, const float* scores, const Scoring& scoring, int64_t low, int64_t high, int64_t first,
                         int64_t last, Weight* weights) {
    const int64_t begin = low < high ? low / LANES * LANES : last, end = low < high ? high : last;
    const float factor = CAPPED ? 1.0f : scoring.factor;
    Floats total{};
    for (int64_t i = first; i < begin; i += LANES) store(weights + i, Floats{});
    int64_t i = begin;
    const auto weigh_some = [&]<int N>(std::integral_constant<int, N>) {
        for (; i + (N - 1) * LANES < end; i += N * LANES) {
            Floats some[N];
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) some[n] = load(scores + i + n * LANES) * factor - top;
            powers_of_two<SHORT>(some);
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) total += some[n], store(weights + i + n * LANES, some[n]);
        }
    };
    weigh_some(std::integral_constant<int, WEIGHED_AT_ONCE>());
    weigh_some(std::integral_constant<int, 1>());
    for (; i < last; i += LANES) store(weights + i, Floats{});
    return sum(total);
}

// Converts one query's scores of the keys low .. high - 1 of a block to weights, the largest of which is 1. Returns the
// largest score and the sum of the weights. Weights of other keys in first .. last - 1 are 0.
template <bool CAPPED, class Weight>
Mass weigh(float* scores, const Scoring& scoring, int64_t low, int64_t high, int64_t first, int64_t last,
           Weight* weights) {
    const float top = top_score<CAPPED>(scores, scoring, low, high);
    return {top, weigh_below<CAPPED>(top, scores, scoring, low, high, first, last, weights)};
}

// Merges the result of a later block into the result of earlier blocks: `out` [head_dim] and its mass.
[[gnu::noinline]] inline void merge(float* out, Mass& mass, const float* part, const Mass& later, int64_t head_dim) {
    const float largest = mass.largest > later.largest ? mass.largest : later.largest;
    const Floats differences = Floats{mass.largest - largest, later.largest - largest};
    const Floats shares = power_of_two(differences);
    for (int64_t d = 0; d < head_dim; d += LANES)
        store(out + d, load(out + d) * shares[0] + load(part + d) * shares[1]);
    mass = {largest, mass.total * shares[0] + later.total * shares[1]};
}

}  // namespace penstock
