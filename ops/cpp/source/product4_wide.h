// Products with weights of 5, 6 or 8 bits in groups. They are like products with 4-bit weights (product4.h), but all
// codes are integers.
//
// The scales and shifts of a group are followed by its codes. With 8 bits, each eight inputs have two words per output,
// whose bytes are the codes of inputs 0, 4, 1, 5 and of inputs 2, 6, 3, 7, as signed bytes. With 5 and 6 bits, the
// words have only the four lowest bits of each code, in the layout of 4-bit codes. The upper bits of 32 inputs (5 bits)
// or 16 inputs (6 bits) follow in one more word per output.
#pragma once

#include "simd.h"

namespace penstock {

// Vectors with as many lanes as the registers of tiles (product4_octets.h).
#if defined(PENSTOCK_OCTETS)
constexpr int CODE_LANES = 8;
typedef uint32_t CodeWords __attribute__((vector_size(32)));
typedef int32_t CodeInts __attribute__((vector_size(32)));
typedef float CodeFloats __attribute__((vector_size(32)));

template <class Scale>
inline CodeFloats load_scales(const Scale* from) {
    return cast<CodeFloats>(octet(from));
}
inline CodeFloats fused_codes(CodeFloats a, CodeFloats b, CodeFloats c) {
    return cast<CodeFloats>(_mm256_fmadd_ps(cast<__m256>(a), cast<__m256>(b), cast<__m256>(c)));
}
#else
constexpr int CODE_LANES = LANES;
typedef Words CodeWords;
typedef Ints CodeInts;
typedef Floats CodeFloats;

template <class Scale>
inline CodeFloats load_scales(const Scale* from) {
    return load(from);
}
inline CodeFloats fused_codes(CodeFloats a, CodeFloats b, CodeFloats c) { return fused(a, b, c); }
#endif

// Layout of BITS-bit codes in a panel, in units of DEPTH inputs.
template <int BITS>
struct Codes {
    static constexpr int64_t DEPTH = BITS == 6 ? 16 : BITS == 5 ? 32 : 8;
    static constexpr int64_t EIGHT = PANEL * (BITS == 8 ? 8 : 4);  // bytes of eight inputs, without the upper bits
    static constexpr int64_t UPPER = EIGHT * DEPTH / WORD_CODES;    // offset of the upper bits in a unit
    static constexpr int64_t UNIT = DEPTH * PANEL * BITS / 8;
    static constexpr int32_t MIDDLE = BITS == 8 ? 0 : 1 << (BITS - 1);  // the code that represents 0
    static constexpr uint32_t UPPER_BITS = BITS == 6 ? 0x03030303u : 0x01010101u;

    // Returns the codes of half number `half` of the e-th eight inputs of a unit, for the outputs from `output` on.
    template <class Words>
    static Words bytes(const uint8_t* unit, int e, int half, int output) {
        Words low, upper;
        const uint8_t* from = unit + e * EIGHT + output * 4;
        std::memcpy(&low, BITS == 8 ? from + half * PANEL * 4 : from, sizeof(low));
        if constexpr (BITS == 8) return low;
        if constexpr (BITS == 4) return low >> (4 * half) & BYTE_CODES;
        std::memcpy(&upper, unit + UPPER + output * 4, sizeof(upper));
        return (low >> (4 * half) & BYTE_CODES) | (upper >> ((BITS - 4) * (2 * e + half)) & UPPER_BITS) << 4;
    }

    // Returns the words of eight inputs with 4 bits.
    static Words words(const uint8_t* unit, int output) {
        Words found;
        std::memcpy(&found, unit + output * 4, sizeof(found));
        return found;
    }

    // Stores the codes of eight inputs, given in the order of their bytes. The memory must be 0.
    static void put(uint8_t* group, int64_t k, int64_t output, uint64_t codes) {
        uint8_t* unit = group + k / DEPTH * UNIT;
        const int64_t e = k % DEPTH / WORD_CODES;
        uint32_t halves[2];
        std::memcpy(halves, &codes, sizeof(halves));
        for (uint32_t& half : halves) half ^= BITS == 8 ? 0x80808080u : 0;
        uint8_t* to = unit + e * EIGHT + output * 4;
        if constexpr (BITS == 8) {
            std::memcpy(to, halves, 4);
            std::memcpy(to + PANEL * 4, halves + 1, 4);
            return;
        }
        const uint32_t low = (halves[0] & BYTE_CODES) | (halves[1] & BYTE_CODES) << 4;
        std::memcpy(to, &low, sizeof(low));
        if constexpr (BITS == 5 || BITS == 6) {
            uint32_t upper;
            std::memcpy(&upper, unit + UPPER + output * 4, sizeof(upper));
            for (int half = 0; half < 2; half++)
                upper |= (halves[half] >> 4 & UPPER_BITS) << ((BITS - 4) * (2 * e + half));
            std::memcpy(unit + UPPER + output * 4, &upper, sizeof(upper));
        }
    }

    // Returns the integer value of one input's code.
    static int32_t number(const uint8_t* group, int64_t k, int64_t output) {
        const uint8_t* unit = group + k / DEPTH * UNIT;
        const uint32_t word = bytes<uint32_t>(unit, int(k % DEPTH / WORD_CODES), int(k >> 1 & 1), int(output));
        const uint32_t code = word >> (8 * (2 * (k & 1) + (k >> 2 & 1))) & 0xffu;
        return BITS == 8 ? int32_t(int8_t(code)) : int32_t(code) - MIDDLE;
    }

    // Returns the integer values of byte n of each word.
    static CodeFloats numbers(CodeWords codes, int n) {
        const CodeInts whole =
            BITS == 8 ? cast<CodeInts>(codes << (24 - 8 * n)) >> 24 : cast<CodeInts>(codes >> (8 * n) & 0xffu) - MIDDLE;
        return __builtin_convertvector(whole, CodeFloats);
    }
};

// Looks up the values of bytes n and n + 2 of each word, which belong to adjacent inputs, as pairs of bfloat16.
template <int BITS>
struct Pairs {
#if defined(__AVX512BW__)
    __m512i table[2];  // for 64 codes

    Pairs() {
        if constexpr (BITS == 8) return;
        uint16_t numbers[64];
        for (int i = 0; i < 64; i++) numbers[i] = round_to_bfloat16(fill(float(i - Codes<BITS>::MIDDLE)))[0];
        std::memcpy(table, numbers, sizeof(table));
    }
#endif

    CodeWords of(CodeWords codes, int n) const {
#if defined(__AVX512BW__)
        const __m512i places = cast<__m512i>(codes >> (8 * n));  // the lookup ignores the bits above an index
        if constexpr (BITS == 5) return cast<CodeWords>(_mm512_permutexvar_epi16(places, table[0]));
        if constexpr (BITS == 6) return cast<CodeWords>(_mm512_permutex2var_epi16(table[0], places, table[1]));
#endif
        const CodeWords low = cast<CodeWords>(Codes<BITS>::numbers(codes, n));
        const CodeWords high = cast<CodeWords>(Codes<BITS>::numbers(codes, n + 2));
        return low >> 16 | (high & 0xffff0000u);
    }
};

// Like multiply_tile4.
template <class T, int BITS, int ROWS>
[[gnu::noinline]] void multiply_codes(const Product4Operands& o, int64_t row, const uint8_t* panel, Floats (*result)[2]) {
    typedef typename ScaleOf<T>::Type Scale;
    typedef Codes<BITS> Code;
    constexpr int VECTORS = PANEL / CODE_LANES;
    constexpr bool IN_PAIRS = sizeof(T) == sizeof(BFloat16) && CODE_LANES == LANES;
    const int64_t groups = o.plain.in_size / o.group, stride = o.plain.x_stride;
    const T* x = static_cast<const T*>(o.plain.x) + row * stride;
    [[maybe_unused]] const Pairs<BITS> pairs;
    CodeFloats sums[ROWS][VECTORS];
#pragma GCC unroll 48
    for (int i = 0; i < ROWS * VECTORS; i++) sums[i / VECTORS][i % VECTORS] = CodeFloats{};
    for (int64_t g = 0; g < groups; g++) {
        const Scale* scales = reinterpret_cast<const Scale*>(panel);
        panel += (1 + o.shifted) * PANEL * sizeof(Scale);
        CodeFloats parts[ROWS][VECTORS];
#pragma GCC unroll 48
        for (int i = 0; i < ROWS * VECTORS; i++) parts[i / VECTORS][i % VECTORS] = CodeFloats{};
        for (int64_t k = 0; k < o.group; k += Code::DEPTH, panel += Code::UNIT, x += Code::DEPTH) {
            if constexpr (ROWS <= 2)  // few rows wait for memory
#pragma GCC unroll 16
                for (int64_t line = 0; line < Code::UNIT; line += 64) __builtin_prefetch(panel + PANEL_AHEAD + line);
#pragma GCC unroll 2
            // only two steps are unrolled, because unrolling all steps would take long to compile
            for (int step = 0; step < 2 * Code::DEPTH / WORD_CODES; step++) {
                const int e = step / 2, half = step % 2;
                const T* inputs = x + e * WORD_CODES + 2 * half;
#pragma GCC unroll 4
                for (int n = 0; n < (IN_PAIRS ? 2 : 4); n++) {
                    if constexpr (IN_PAIRS) {
                        const CodeWords first = pairs.of(Code::template bytes<CodeWords>(panel, e, half, 0), n);
                        const CodeWords second = pairs.of(Code::template bytes<CodeWords>(panel, e, half, LANES), n);
#pragma GCC unroll 16
                        for (int r = 0; r < ROWS; r++) {
                            const auto value = fill_lanes(inputs + r * stride + 4 * n);
                            parts[r][0] = multiply_add(parts[r][0], first, value);
                            parts[r][1] = multiply_add(parts[r][1], second, value);
                        }
                    } else {
#pragma GCC unroll 4
                        for (int i = 0; i < VECTORS; i++) {
                            const auto codes = Code::template bytes<CodeWords>(panel, e, half, i * CODE_LANES);
                            const CodeFloats numbers = Code::numbers(codes, n);
#pragma GCC unroll 16
                            for (int r = 0; r < ROWS; r++) {
                                const CodeFloats value = CodeFloats{} + widen(inputs[r * stride + n / 2 + 4 * (n % 2)]);
                                parts[r][i] = fused_codes(numbers, value, parts[r][i]);
                            }
                        }
                    }
                }
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i++) {
            const CodeFloats scale = load_scales(scales + i * CODE_LANES);
            const CodeFloats shift = o.shifted ? load_scales(scales + PANEL + i * CODE_LANES) : CodeFloats{};
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                sums[r][i] = fused_codes(parts[r][i], scale, sums[r][i]);
                if (o.shifted)
                    sums[r][i] = fused_codes(shift, CodeFloats{} + o.group_sums[(row + r) * groups + g], sums[r][i]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < VECTORS; i++)
            std::memcpy(reinterpret_cast<uint8_t*>(result[r]) + i * sizeof(CodeFloats), &sums[r][i], sizeof(CodeFloats));
}

// Calls work(Codes<bits>).
template <class Work>
inline auto with_codes(int64_t bits, const Work& work) {
    switch (bits) {
        case 5: return work(Codes<5>{});
        case 6: return work(Codes<6>{});
        case 8: return work(Codes<8>{});
        default: return work(Codes<4>{});
    }
}

}  // namespace penstock
