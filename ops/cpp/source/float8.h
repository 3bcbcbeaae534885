// float8 elements of a KV cache, with 4 bits of exponent (e4m3fn) or 5 (e5m2). Stored elements are divided by a scale.
#pragma once

#include "simd.h"

namespace penstock {

typedef uint8_t Bytes __attribute__((vector_size(16)));

// Dtype of a cache; library.py has the same codes.
enum CacheType : int64_t { ALIKE = 0, E4M3 = 1, E5M2 = 2 };

inline Floats widen_halves(Shorts halves) {
#if defined(__AVX512F__)
    return cast<Floats>(_mm512_cvtph_ps(cast<__m256i>(halves)));
#else
    const Words bits = __builtin_convertvector(halves, Words), magnitude = bits & 0x7fffu;
    const Words infinite = (0u - ((magnitude + 0x400u) >> 15)) & 0x7f800000u;  // infinity or NaN
    const Words finite = cast<Words>(cast<Floats>(magnitude << 13) * 0x1p112f);
    return cast<Floats>(finite | infinite | ((bits & 0x8000u) << 16));
#endif
}

template <CacheType FORM>
inline Floats widen_bytes(const uint8_t* from) {
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof(bytes));
    const Shorts bits = __builtin_convertvector(bytes, Shorts);
    if constexpr (FORM == E5M2) return widen_halves(bits << 8);
    const Shorts magnitude = bits & uint16_t(0x7f), sign = (bits & uint16_t(0x80)) << 8;
    const Shorts no_number = (Shorts{} - ((magnitude + uint16_t(1)) >> 7)) & uint16_t(0x7c00);
    return widen_halves((magnitude << 7) | sign | no_number) * 256.0f;
}

// Rounds 16 numbers to nearest, ties to even, and clamps them to the largest value.
template <CacheType FORM>
inline void narrow_bytes(uint8_t* to, Floats x) {
    constexpr int BITS = FORM == E4M3 ? 3 : 2;                       // mantissa bits
    constexpr int LOWEST = FORM == E4M3 ? 127 - 6 : 127 - 14;          // exponent of the smallest normal number
    const float most = FORM == E4M3 ? 448.0f : 57344.0f;
    const Floats magnitude = smaller(fill(most), cast<Floats>(cast<Words>(x) & 0x7fffffffu));
    const Floats least = cast<Floats>(Words{} + (uint32_t(LOWEST) << 23));
    const Words exponent = cast<Words>(larger(magnitude, least)) >> 23;
    // A number whose last bit has the same weight as the last bit of the result, so adding it rounds.
    const Words anchor = (exponent + uint32_t(23 - BITS)) << 23;
    Words code = cast<Words>(magnitude + cast<Floats>(anchor)) - anchor + ((exponent - uint32_t(LOWEST)) << BITS);
    const Words no_number = cast<Words>(x != x) & 0x7fu;
    code = (code & ~cast<Words>(x != x)) | no_number | ((cast<Words>(x) >> 31) << 7);
    const Bytes bytes = __builtin_convertvector(code, Bytes);
    std::memcpy(to, &bytes, sizeof(bytes));
}

// Converts `size` elements (a multiple of 16) of a cache to T, without multiplying by the scale.
template <class T>
inline void read_cached(CacheType type, const void* pool, int64_t at, T* to, int64_t size) {
    if (type == ALIKE) return void(std::memcpy(to, static_cast<const T*>(pool) + at, size * sizeof(T)));
    const uint8_t* from = static_cast<const uint8_t*>(pool) + at;
    for (int64_t k = 0; k < size; k += LANES)
        store(to + k, type == E4M3 ? widen_bytes<E4M3>(from + k) : widen_bytes<E5M2>(from + k), LANES);
}

// Converts T to the cache's dtype; `steps` is 1 / scale.
template <class T>
inline void write_cached(CacheType type, void* pool, int64_t at, const T* from, int64_t size, float steps) {
    if (type == ALIKE) return void(std::memcpy(static_cast<T*>(pool) + at, from, size * sizeof(T)));
    uint8_t* to = static_cast<uint8_t*>(pool) + at;
    for (int64_t k = 0; k < size; k += LANES) {
        const Floats x = load(from + k, LANES) * steps;
        type == E4M3 ? narrow_bytes<E4M3>(to + k, x) : narrow_bytes<E5M2>(to + k, x);
    }
}

}  // namespace penstock
