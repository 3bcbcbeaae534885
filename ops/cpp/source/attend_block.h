// Attention of a few queries over one block of keys: what decode rows and prompts have in common.
//
// A query's result depends on nothing but its own row. Each block of keys, counted from position 0, has a softmax of
// its own (`weigh`), and the blocks are merged in order (`merge`); all sums within have one order, whichever queries
// are computed together and by whichever thread.
#pragma once

#include <type_traits>

#include "simd.h"

namespace penstock {

constexpr int64_t KEY_BLOCK = 256;  // part of the arithmetic: where the sums of a row are cut
constexpr float NO_SCORE = -1e30f;  // the largest of no scores; finite, so that differences are numbers
constexpr float LOG2_E = 1.44269504088896341f;

// Products are taken of words of four bytes: pairs of bfloat16 where the processor multiplies those, else float32.
template <class T>
constexpr int64_t PER_WORD =
#if defined(__AVX512BF16__)
    std::is_same_v<T, BFloat16> ? 2 : 1;
#else
    1;
#endif

template <class T>
inline Floats dot_words(Floats total, Words a, Words b) {
    if constexpr (PER_WORD<T> == 2) return dot_pairs(total, a, b);
    return total + cast<Floats>(a) * cast<Floats>(b);
}

inline Words load_words(const uint32_t* from) {
    Words x;
    std::memcpy(&x, from, sizeof(x));
    return x;
}

inline void store_words(uint32_t* to, Words x) { std::memcpy(to, &x, sizeof(x)); }

typedef uint32_t Four __attribute__((vector_size(16)));
typedef uint32_t Eight __attribute__((vector_size(32)));
typedef uint16_t EightShorts __attribute__((vector_size(16)));

// The next 8 words.
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

inline void fetch(const char* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// 16 keys [16, D] side by side: word w of key i goes to packed[w * 16 + i]. Meanwhile as many are fetched from `ahead`,
// line by line, as the processor can only wait for some at a time.
template <class T>
inline void pack_keys(const T* keys, int64_t head_dim, uint32_t* packed, const T* ahead) {
    constexpr int64_t STEP = 8 * PER_WORD<T>;
    for (int64_t d = 0; d < head_dim; d += STEP, packed += 8 * LANES) {
        fetch(reinterpret_cast<const char*>(ahead + d * LANES), STEP * LANES * sizeof(T));
#if defined(__AVX512F__)
        __m512i a[8], b[8];
        for (int i = 0; i < 8; i++) {  // key 0 and 4, 1 and 5, .. 8 and 12, ..
            const T* const key = keys + (i + (i & 4)) * head_dim + d;
            a[i] = _mm512_inserti64x4(_mm512_castsi256_si512(cast<__m256i>(words_of(key))),
                                      cast<__m256i>(words_of(key + 4 * head_dim)), 1);
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
                const Eight x = words_of(keys + (i + k) * head_dim + d);
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

// 16 values [16, D], those of one word of weights lane by lane: packed is [16 / PER_WORD, D].
template <class T>
inline void pack_values(const T* values, int64_t head_dim, uint32_t* packed, const T* ahead) {
    for (int key = 0; key < LANES; key += PER_WORD<T>, packed += head_dim) {
        const T *const first = values + key * head_dim, *const second = first + head_dim;
        fetch(reinterpret_cast<const char*>(ahead + key * head_dim), PER_WORD<T> * head_dim * sizeof(T));
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

// Where the factors of a product stand: a[row * a_row + step] times b[step * b_step + vector * b_vector + lane].
struct Factors {
    const uint32_t* a;
    int64_t a_row;
    const uint32_t* b;
    int64_t b_step;
    int64_t b_vector;
    int64_t steps;
};

// Sums are held in parts: of wider vectors the compiler keeps some in memory.
constexpr int TILE_HEIGHT = sizeof(Part) >= 32 ? 6 : 3;

template <class T>
inline Part dot_part(Part total, uint32_t a, const uint32_t* b) {
    Part x;
    std::memcpy(&x, b, sizeof(x));
    if constexpr (PER_WORD<T> == 2)
        return cast<Part>(dot_pairs(cast<Floats>(total), Words{} + a, load_words(b)));
    else
        return total + cast<float>(a) * x;
}

template <class T, int ROWS, int VECTORS>
void dot_tile(const Factors& of, float* c, int64_t c_row) {
    constexpr int WIDTH = LANES / PARTS, COUNT = VECTORS * PARTS;
    Part sums[ROWS][COUNT] = {};
    const uint32_t *a = of.a, *b = of.b;
    const int64_t a_row = of.a_row, b_vector = of.b_vector;
    for (int64_t step = 0; step < of.steps; step++, a++, b += of.b_step)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
            for (int p = 0; p < COUNT; p++)
                sums[r][p] = dot_part<T>(sums[r][p], a[r * a_row], b + p / PARTS * b_vector + p % PARTS * WIDTH);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int p = 0; p < COUNT; p++)
            std::memcpy(c + r * c_row + p * WIDTH, &sums[r][p], sizeof(Part));
}

template <class T, int VECTORS>
void dot_rows(Factors of, int64_t rows, float* c, int64_t c_row) {
    constexpr int HEIGHT = TILE_HEIGHT;
    for (; rows >= HEIGHT; rows -= HEIGHT, of.a += HEIGHT * of.a_row, c += HEIGHT * c_row)
        dot_tile<T, HEIGHT, VECTORS>(of, c, c_row);
    for (; rows >= 3; rows -= 3, of.a += 3 * of.a_row, c += 3 * c_row) dot_tile<T, 3, VECTORS>(of, c, c_row);
    if (rows == 2) dot_tile<T, 2, VECTORS>(of, c, c_row);
    if (rows == 1) dot_tile<T, 1, VECTORS>(of, c, c_row);
}

// c[row * c_row + vector * 16 + lane], in float32, for all rows and vectors.
template <class T>
void dot_all(Factors of, int64_t rows, int64_t vectors, float* c, int64_t c_row) {
#if defined(__AVX512F__)
    for (; vectors >= 4; vectors -= 4, of.b += 4 * of.b_vector, c += 4 * LANES) dot_rows<T, 4>(of, rows, c, c_row);
    if (vectors == 3) return dot_rows<T, 3>(of, rows, c, c_row);
    if (vectors == 2) return dot_rows<T, 2>(of, rows, c, c_row);
#endif
    for (; vectors > 0; vectors--, of.b += of.b_vector, c += LANES) dot_rows<T, 1>(of, rows, c, c_row);
}

// 2 to the x for x <= 0, relative error 1e-7, exact at 0; 0 below -126, as for minus infinity. A NaN stays one.
inline Floats power_of_two(Floats x) {
    const Floats low = fill(-126.0f);
    const Floats held = where_less(x, low, low, x);
    const Floats shifted = held + 12582912.0f;  // 1.5 * 2^23: the integer part is in the lowest bits
    const Floats r = held - (shifted - 12582912.0f);
    Floats p = fill(1.326472731e-03f);
    p = p * r + 9.671512991e-03f;
    p = p * r + 5.550733581e-02f;
    p = p * r + 2.402224243e-01f;
    p = p * r + 6.931470037e-01f;
    p = p * r + 1.0f;
    const Floats result = cast<Floats>(cast<Ints>(p) + (cast<Ints>(shifted) << 23));
    return where_less(x, low, Floats{}, result);
}

inline float power_of_two(float x) { return power_of_two(fill(x))[0]; }

// Accurate to about 1e-7, absolutely.
inline Floats tangent(Floats x) {
    const Floats size = x < 0.0f ? -x : x;
    const Floats decay = power_of_two(size * (-2.0f * LOG2_E));
    const Floats far = (1.0f - decay) / (1.0f + decay);
    const Floats square = x * x;
    const Floats near = size * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15)));
    const Floats found = size < 0.125f ? near : far;
    return x < 0.0f ? -found : found;
}

// How products become the exponents of 2 in a softmax.
struct Scoring {
    float factor;   // without a cap
    float inverse;  // into the tangent
    float cap;      // out of the tangent; 0: none

    Floats operator()(Floats products) const {
        return cap == 0 ? products * factor : tangent(products * inverse) * cap;
    }
};

inline Floats hide_outside(Floats x, int64_t lane_0, int64_t low, int64_t high) {
    const Ints lane = Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + int32_t(lane_0);
    const Ints hidden = (lane < int32_t(low)) | (lane >= int32_t(high));
    return hidden ? fill(-__builtin_inff()) : x;
}

// One query's scores of the keys low .. high - 1 of a block become weights, their largest is 1; returns what was the
// largest score and the sum of the weights. Weights of other keys within first .. last - 1 are 0.
struct Mass {
    float largest;
    float total;
};

template <class Weight>
Mass weigh(float* scores, const Scoring& scoring, int64_t low, int64_t high, int64_t first, int64_t last,
           Weight* weights) {
    const int64_t begin = low < high ? low / LANES * LANES : last, end = low < high ? high : last;
    Floats largest_of = fill(NO_SCORE);
    for (int64_t i = begin; i < end; i += LANES) {
        Floats x = scoring(load(scores + i));
        if (i < low || i + LANES > high) x = hide_outside(x, i, low, high);
        store(scores + i, x);
        largest_of = larger(x, largest_of);
    }
    const float top = largest(largest_of);
    Floats total{};
    for (int64_t i = first; i < begin; i += LANES) store(weights + i, Floats{});
    int64_t i = begin;
    for (; i < end; i += LANES) {
        const Floats weight = power_of_two(load(scores + i) - top);
        total += weight;
        store(weights + i, weight);
    }
    for (; i < last; i += LANES) store(weights + i, Floats{});
    return {top, sum(total)};
}

// Adds what a later block gave to the sum over those before it: out[0 .. head_dim) and its mass.
[[gnu::noinline]] inline void merge(float* out, Mass& mass, const float* part, const Mass& later, int64_t head_dim) {
    const float largest = mass.largest > later.largest ? mass.largest : later.largest;
    const Floats differences = Floats{mass.largest - largest, later.largest - largest};
    const Floats shares = power_of_two(differences);
    for (int64_t d = 0; d < head_dim; d += LANES)
        store(out + d, load(out + d) * shares[0] + load(part + d) * shares[1]);
    mass = {largest, mass.total * shares[0] + later.total * shares[1]};
}

}  // namespace penstock
