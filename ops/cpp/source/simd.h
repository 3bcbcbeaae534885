// Vectors of sixteen lanes for any processor. The compiler lowers them to AVX-512, to pairs of AVX2 registers, or to
// other vector registers. A few functions use intrinsics where the compiler's code would be slow.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace penstock {

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32)));

// A brain float: the upper half of a float32.
struct BFloat16 {
    uint16_t bits;
};

template <class To, class From>
inline To cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "a cast keeps the bits");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

// Rounds x up to a multiple of `grain`.
inline int64_t round_up(int64_t x, int64_t grain) { return (x + grain - 1) / grain * grain; }

// Prefetches memory that is read soon.
template <class T>
inline void fetch(const T* from, int64_t size) {
    for (int64_t i = 0; i < size; i += 64 / sizeof(T)) __builtin_prefetch(from + i);
}

template <class T>
inline void fetch_to_write(T* to, int64_t size) {
    for (int64_t i = 0; i < size; i += 64 / sizeof(T)) __builtin_prefetch(to + i, 1);
}

// Not 0 + value: the compiler would compute this sum at run time, and it would turn -0 into 0.
inline Floats fill(float value) { return value - Floats{}; }

inline Floats load(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof(x));
    return x;
}

inline Floats widen(Shorts halves) {
#if defined(__AVX512F__)  // GCC 12 would convert in two halves
    return cast<Floats>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(cast<__m256i>(halves)), 16));
#else
    return cast<Floats>(__builtin_convertvector(halves, Words) << 16);
#endif
}

inline Floats load(const BFloat16* from) {
    Shorts halves;
    std::memcpy(&halves, from, sizeof(halves));
    return widen(halves);
}

// Loads the first `count` lanes; the other lanes are 0. If `count` is half of the lanes, it uses a plain load, because
// a masked load would wait for pending stores to adjacent memory.
inline Floats load(const float* from, int64_t count) {
    if (count == LANES) return load(from);
#if defined(__AVX512F__)
    if (count == LANES / 2) return cast<Floats>(_mm512_zextps256_ps512(_mm256_loadu_ps(from)));
    return cast<Floats>(_mm512_maskz_loadu_ps((1u << count) - 1, from));
#else
    Floats x{};
    std::memcpy(&x, from, count * sizeof(float));
    return x;
#endif
}

inline Floats load(const BFloat16* from, int64_t count) {
    if (count == LANES) return load(from);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    if (count == LANES / 2)
        return widen(cast<Shorts>(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))));
    return widen(cast<Shorts>(_mm256_maskz_loadu_epi16((1u << count) - 1, from)));
#else
    Shorts halves{};
    std::memcpy(&halves, from, count * sizeof(BFloat16));
    return widen(halves);
#endif
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }

inline void store(float* to, Floats x, int64_t count) {
    if (count == LANES) return store(to, x);
#if defined(__AVX512F__)
    if (count == LANES / 2) return _mm256_storeu_ps(to, _mm512_castps512_ps256(cast<__m512>(x)));
    _mm512_mask_storeu_ps(to, (1u << count) - 1, cast<__m512>(x));
#else
    std::memcpy(to, &x, count * sizeof(float));
#endif
}

// Rounds to nearest, ties to even. A NaN stays NaN.
inline Shorts round_to_bfloat16(Floats x) {
#if defined(__AVX512BF16__)
    return cast<Shorts>(_mm512_cvtneps_pbh(cast<__m512>(x)));
#else
    const Words bits = cast<Words>(x);
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Words quiet = (bits >> 16) | 0x40u;
    return __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded, Shorts);
#endif
}

inline void store(BFloat16* to, Floats x) {
    const Shorts halves = round_to_bfloat16(x);
    std::memcpy(to, &halves, sizeof(halves));
}

inline void store(BFloat16* to, Shorts halves, int64_t count) {
    if (count == LANES) return void(std::memcpy(to, &halves, sizeof(halves)));
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const __m256i x = cast<__m256i>(halves);
    if (count == LANES / 2) return _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(x));
    _mm256_mask_storeu_epi16(to, (1u << count) - 1, x);
#else
    std::memcpy(to, &halves, count * sizeof(BFloat16));
#endif
}

inline void store(BFloat16* to, Floats x, int64_t count) { store(to, round_to_bfloat16(x), count); }

// Stores the first `count` lanes, and returns all lanes rounded to the type of `to`.
inline Floats store_rounded(float* to, Floats x, int64_t count) {
    store(to, x, count);
    return x;
}

inline Floats store_rounded(BFloat16* to, Floats x, int64_t count) {
    const Shorts halves = round_to_bfloat16(x);
    store(to, halves, count);
    return widen(halves);
}

inline Floats rounded(const float*, Floats x) { return x; }
inline Floats rounded(const BFloat16*, Floats x) { return widen(round_to_bfloat16(x)); }

// Calls work(k, count) for lanes k .. k + count - 1 of `size`; count is 16, except for the last call.
template <class Work>
inline void in_vectors(int64_t size, const Work& work) {
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) work(k, LANES);
    if (k < size) work(k, size - k);
}

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) { return cast<float>(uint32_t(x.bits) << 16); }

inline void narrow(float* to, float x) { *to = x; }
inline void narrow(BFloat16* to, float x) { to->bits = round_to_bfloat16(fill(x))[0]; }

// The widest vector that fits in a register of the processor.
#if defined(__AVX512F__)
typedef Floats Part;
#elif defined(__AVX__)
typedef float Part __attribute__((vector_size(32)));
#else
typedef float Part __attribute__((vector_size(16)));
#endif
constexpr int PARTS = sizeof(Floats) / sizeof(Part);

// x < y ? a : b in each lane, one register at a time, because GCC 12 compares wider vectors lane by lane.
inline Floats where_less(Floats x, Floats y, Floats a, Floats b) {
    Part parts[4][PARTS];
    const Floats whole[] = {x, y, a, b};
    std::memcpy(parts, whole, sizeof(parts));
    for (int i = 0; i < PARTS; i++) parts[0][i] = parts[0][i] < parts[1][i] ? parts[2][i] : parts[3][i];
    std::memcpy(&x, parts[0], sizeof(x));
    return x;
}

// If a or b is NaN in a lane, `larger` and `smaller` return b's lane.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
    return cast<Floats>(_mm512_max_ps(cast<__m512>(a), cast<__m512>(b)));
#else
    return where_less(b, a, a, b);
#endif
}

inline Floats smaller(Floats a, Floats b) {
#if defined(__AVX512F__)
    return cast<Floats>(_mm512_min_ps(cast<__m512>(a), cast<__m512>(b)));
#else
    return where_less(a, b, a, b);
#endif
}

inline float sum(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(cast<__m512>(x));  // sums in the same order as the code below
#endif
    float total = 0;
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++) x[lane] += x[lane + width];
    total = x[0];
    return total;
}

inline float largest(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(cast<__m512>(x));
#endif
    float found = x[0];
    for (int lane = 1; lane < LANES; lane++) found = x[lane] > found ? x[lane] : found;
    return found;
}

// e to the power of x, with a relative error below 2e-7. x is clamped to -87 .. 87. A NaN stays NaN.
inline Floats exponential(Floats x) {
    const Floats held = smaller(fill(87.0f), larger(fill(-87.0f), x));
    // adding 1.5 * 2^23 leaves the rounded integer in the lowest bits
    const Floats shifted = held * 1.44269504088896341f + 12582912.0f;
    const Floats n = shifted - 12582912.0f;
    const Floats r = held - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = fill(8.2900587862e-3f);
    p = p * r + 4.1899312925e-2f;
    p = p * r + 1.6667647833e-1f;
    p = p * r + 4.9999139356e-1f;
    p = p * r + 9.9999970190e-1f;
    p = p * r + 1.0f;
    return cast<Floats>(cast<Ints>(p) + (cast<Ints>(shifted) << 23));
}

// p[i] = terms[0] * x[i]^n + .. + terms[n]. It computes several vectors at once, because a single polynomial is a chain
// of dependent instructions.
template <int N, int TERMS>
inline void polynomials(const float (&terms)[TERMS], const Floats (&x)[N], Floats (&p)[N]) {
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) p[i] = fill(terms[0]);
#pragma GCC unroll 16
    for (int term = 1; term < TERMS; term++)
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) p[i] = p[i] * x[i] + terms[term];
}

// 2 to the power of r for r from -0.5 to 0.5. With SHORT, the relative error is 1e-4.
template <bool SHORT, int N>
inline void near_powers(const Floats (&r)[N], Floats (&p)[N]) {
    static constexpr float FULL[] = {1.326472731e-03f, 9.671512991e-03f, 5.550733581e-02f,
                                     2.402224243e-01f, 6.931470037e-01f, 1.0f};
    static constexpr float FEW[] = {5.500849090e-02f, 2.422112488e-01f, 6.932830059e-01f, 1.0f};
    if constexpr (SHORT)
        polynomials(FEW, r, p);
    else
        polynomials(FULL, r, p);
}

// 2 to the power of each x <= 0, with a relative error of 1e-7 (SHORT: 1e-4). The result is exact for x = 0, and 0 for
// x below -126. A NaN stays NaN.
template <bool SHORT, int N>
inline void powers_of_two(Floats (&x)[N]) {
    Floats r[N], p[N];
#if defined(__AVX512F__)
    __m512 n[N];
    __mmask16 seen[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) {
        const __m512 given = cast<__m512>(x[i]);
        seen[i] = _mm512_cmp_ps_mask(given, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
        n[i] = _mm512_roundscale_ps(given, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        r[i] = x[i] - cast<Floats>(n[i]);
    }
    near_powers<SHORT>(r, p);
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) x[i] = cast<Floats>(_mm512_maskz_scalef_ps(seen[i], cast<__m512>(p[i]), n[i]));
#else
    const Floats low = fill(-126.0f);
    Floats shifted[N];
    for (int i = 0; i < N; i++) {
        const Floats held = where_less(x[i], low, low, x[i]);
        shifted[i] = held + 12582912.0f;  // adding 1.5 * 2^23 leaves the rounded integer in the lowest bits
        r[i] = held - (shifted[i] - 12582912.0f);
    }
    near_powers<SHORT>(r, p);
    for (int i = 0; i < N; i++) {
        const Floats result = cast<Floats>(cast<Ints>(p[i]) + (cast<Ints>(shifted[i]) << 23));
        x[i] = where_less(x[i], low, Floats{}, result);
    }
#endif
}

inline Floats power_of_two(Floats x) {
    Floats alone[] = {x};
    powers_of_two<false>(alone);
    return alone[0];
}

inline float power_of_two(float x) { return power_of_two(fill(x))[0]; }

// 1 / x, relative error below 2e-7, for x from 1 to 2e38. A NaN stays NaN.
inline Floats reciprocal(Floats x) {
#if defined(__AVX512F__)  // the first estimate has 14 bits
    const Floats y = cast<Floats>(_mm512_rcp14_ps(cast<__m512>(x)));
    return y + y * (1.0f - x * y);
#else
    return 1.0f / x;
#endif
}

// Loads two adjacent bfloat16 per lane.
inline Words load_pairs(const BFloat16* from) {
    Words pairs;
    std::memcpy(&pairs, from, sizeof(pairs));
    return pairs;
}

inline Words fill_pair(const BFloat16* from) {
    uint32_t pair;
    std::memcpy(&pair, from, sizeof(pair));
    return Words{} + pair;
}

// total + a.low * b.low + a.high * b.high, in float32.
inline Floats dot_pairs(Floats total, Words a, Words b) {
#if defined(__AVX512BF16__)
    return cast<Floats>(_mm512_dpbf16_ps(cast<__m512>(total), cast<__m512bh>(a), cast<__m512bh>(b)));
#else
    total += cast<Floats>(a << 16) * cast<Floats>(b << 16);
    return total + cast<Floats>(a & 0xffff0000u) * cast<Floats>(b & 0xffff0000u);
#endif
}

}  // namespace penstock
