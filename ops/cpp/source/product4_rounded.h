// Products of 4-bit weights (product4.h) with rows that are rounded to 8 bits, in integers: four products per
// instruction.
#pragma once

#include <vector>

#include "product4.h"

namespace penstock {

// The sixteen integers of the table plus 128, as bytes.
struct ByteTable {
    alignas(64) uint8_t numbers[64];  // the table four times

    explicit ByteTable(const float* from) {
        for (int i = 0; i < 64; i++) numbers[i] = uint8_t(int32_t(from[i % 16]) + 128);
    }

    // Returns the numbers of the codes in the four lowest bits of each byte. The upper bits must be 0.
    Words look_up(Words codes) const {
#if defined(__AVX512BW__)
        return cast<Words>(_mm512_shuffle_epi8(_mm512_load_si512(numbers), cast<__m512i>(codes)));
#elif defined(__AVX2__)
        __m256i table, part[2];
        std::memcpy(&table, numbers, sizeof(table));
        std::memcpy(part, &codes, sizeof(part));
        for (int half = 0; half < 2; half++) part[half] = _mm256_shuffle_epi8(table, part[half]);
        Words found;
        std::memcpy(&found, part, sizeof(found));
        return found;
#else
        uint8_t bytes[sizeof(Words)];
        std::memcpy(bytes, &codes, sizeof(bytes));
        for (uint8_t& byte : bytes) byte = numbers[byte & 15];
        Words found;
        std::memcpy(&found, bytes, sizeof(found));
        return found;
#endif
    }
};

// Rows of x in 8 bits. A line has the row's bytes in the order of a word's codes (0, 4, 1, 5, 2, 6, 3, 7 of each eight
// inputs). They are followed by -128 times the sum of the bytes of each group, and then by the row's scale.
struct Rounded4 {
    int8_t* lines;
    int64_t in_size, group;

    explicit Rounded4(const Product4Operands& o) : lines(o.rounded), in_size(o.plain.in_size), group(o.group) {}
    int64_t groups() const { return in_size / group; }
    int64_t stride() const { return round_up(in_size + (groups() + 1) * int64_t(sizeof(int32_t)), UNIT_BYTES); }
    int8_t* row(int64_t row) const { return lines + row * stride(); }
    int32_t* offsets(int64_t row) const { return reinterpret_cast<int32_t*>(this->row(row) + in_size); }
    float& scale(int64_t row) const { return *reinterpret_cast<float*>(offsets(row) + groups()); }

    static uint64_t eight_at(const int8_t* from) {
        uint64_t eight;
        std::memcpy(&eight, from, sizeof(eight));
        return eight;
    }

    // Returns the sum of eight signed bytes, each stored plus 128.
    static uint64_t sum_of_eight(uint64_t bytes) {
        constexpr uint64_t EVEN = 0x00ff00ff00ff00ffu;
        bytes ^= 0x8080808080808080u;
        bytes = (bytes & EVEN) + (bytes >> 8 & EVEN);
        bytes += bytes >> 32;
        return (bytes + (bytes >> 16)) & 0xffffu;
    }

    // Moves the four lowest bytes to bytes 0, 2, 4 and 6.
    static uint64_t spread(uint64_t bytes) {
        bytes &= 0xffffffffu;
        bytes = (bytes | bytes << 16) & 0x0000ffff0000ffffu;
        return (bytes | bytes << 8) & 0x00ff00ff00ff00ffu;
    }

    // Rounds a row, in loops that the compiler vectorises with eight bytes per lane.
    template <class T>
    void round(int64_t row, const T* x) const {
        int8_t* bytes = this->row(row);
        scale(row) = round_row(x, in_size, bytes).scale;
        for (int64_t g = 0; g < groups(); g++) {
            uint64_t total = 0;
            for (int64_t k = 0; k < group; k += WORD_CODES) total += sum_of_eight(eight_at(bytes + g * group + k));
            offsets(row)[g] = -128 * (int32_t(total) - 128 * int32_t(group));
        }
        for (int64_t k = 0; k < in_size; k += WORD_CODES) {
            const uint64_t eight = eight_at(bytes + k), mixed = spread(eight) | spread(eight >> 32) << 8;
            std::memcpy(bytes + k, &mixed, sizeof(mixed));
        }
    }
};

// Maximum number of rows for which tiles that decode in registers are as fast as decoded panels.
constexpr int MAX_ROUNDED_UNDECODED = std::min(MAX_TILE_ROWS, 8);
constexpr int USUAL_DEPTH = 32;  // usual divisor of the group size

// Copies four bytes to each lane.
inline Words fill_quad(const int8_t* from) {
    uint32_t four;
    std::memcpy(&four, from, sizeof(four));
    return Words{} + four;
}

// result[r] = the rounded row number `row` + r . panel. The group size is a multiple of DEPTH, the length of an
// unrolled loop.
template <class T, int ROWS, int DEPTH, bool DECODED>
[[gnu::noinline]] void multiply_rounded4(const Product4Operands& o, const ByteTable& table, const Rounded4& rounded,
                                         int64_t row, const uint8_t* panel, const Words* decoded,
                                         Floats (*result)[2]) {
    typedef typename ScaleOf<T>::Type Scale;
    constexpr int64_t STEP = PANEL * sizeof(uint32_t);
    const int64_t stride = rounded.stride(), groups = rounded.groups(), group = o.group;
    const bool shifted = o.shifted;
    const int64_t ahead = DECODED ? panel_bytes4<T>(o.plain.in_size, group, shifted, 4) : PANEL_AHEAD;
    const int8_t* x = rounded.row(row);
    const int8_t* offsets = x + o.plain.in_size;
    Floats sums[ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = Floats{};
    for (int64_t g = 0; g < groups; g++, offsets += sizeof(int32_t)) {
        const Scale* scales = reinterpret_cast<const Scale*>(panel);
        panel += (1 + shifted) * PANEL * sizeof(Scale);
        Ints parts[ROWS][2];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) parts[r][0] = parts[r][1] = cast<Ints>(fill_quad(offsets + r * stride));
        for (int64_t k = 0; k < group; k += DEPTH) {
#pragma GCC unroll 8
            for (int n = 0; n < DEPTH; n += WORD_CODES, panel += STEP) {
                // With few rows, the tile waits for memory and prefetches nearby. With many rows, it prefetches the
                // next panel while it computes.
                __builtin_prefetch(panel + ahead, 0, DECODED ? 2 : 3);
                __builtin_prefetch(panel + ahead + STEP / 2, 0, DECODED ? 2 : 3);
                Words codes[2] = {};
                if constexpr (!DECODED) std::memcpy(codes, panel, sizeof(codes));
#pragma GCC unroll 2
                for (int shift = 0; shift < 8; shift += 4, decoded += 2, x += QUAD) {
                    const Words first = DECODED ? decoded[0] : table.look_up(codes[0] >> shift & BYTE_CODES);
                    const Words second = DECODED ? decoded[1] : table.look_up(codes[1] >> shift & BYTE_CODES);
#pragma GCC unroll 16
                    for (int r = 0; r < ROWS; r++) {
                        const Words values = fill_quad(x + r * stride);
                        parts[r][0] = dot_quads(parts[r][0], first, values);
                        parts[r][1] = dot_quads(parts[r][1], second, values);
                    }
                }
            }
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const Floats scale = load(scales + half * LANES);
            const Floats shift = shifted ? load(scales + PANEL + half * LANES) : Floats{};
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                sums[r][half] = fused(__builtin_convertvector(parts[r][half], Floats), scale, sums[r][half]);
                if (shifted)
                    sums[r][half] = fused(shift, fill(float(rounded.offsets(row + r)[g] / -128)), sums[r][half]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        for (int half = 0; half < 2; half++) result[r][half] = sums[r][half] * fill(rounded.scale(row + r));
}

}  // namespace penstock

#include "product4_octets.h"  // uses the definitions above

namespace penstock {

template <class T, int ROWS = MAX_ROUNDED_UNDECODED>
inline void multiply_rounded_rows4(const Product4Operands& o, const ByteTable& table, const Rounded4& rounded,
                                   int64_t row, int64_t height, const uint8_t* panel, const Words* numbers,
                                   Floats (*sums)[2]) {
    if constexpr (ROWS > 0) {
        if (height != ROWS)
            return multiply_rounded_rows4<T, ROWS - 1>(o, table, rounded, row, height, panel, numbers, sums);
#if defined(PENSTOCK_OCTETS)
        return numbers ? multiply_rounded_octets4<T, ROWS, true>(o, table, rounded, row, panel, numbers, sums)
                       : multiply_rounded_octets4<T, ROWS, false>(o, table, rounded, row, panel, nullptr, sums);
#else
        const bool usual = o.group % USUAL_DEPTH == 0;
        if constexpr (ROWS <= MAX_GROUPED_ROWS)
            if (numbers)
                return usual ? multiply_rounded4<T, ROWS, USUAL_DEPTH, true>(o, table, rounded, row, panel, numbers, sums)
                             : multiply_rounded4<T, ROWS, WORD_CODES, true>(o, table, rounded, row, panel, numbers, sums);
        usual ? multiply_rounded4<T, ROWS, USUAL_DEPTH, false>(o, table, rounded, row, panel, nullptr, sums)
              : multiply_rounded4<T, ROWS, WORD_CODES, false>(o, table, rounded, row, panel, nullptr, sums);
#endif
    }
}

// Decodes a panel to this thread's memory, for several tiles of rows. Returns null if decoding in registers is faster.
template <class T>
inline const Words* decode_bytes4(const Product4Operands& o, const ByteTable& table, const uint8_t* panel, int64_t rows) {
    if (rows <= MAX_ROUNDED_UNDECODED) return nullptr;
    thread_local std::vector<Words> room;
    if (int64_t(room.size()) < o.plain.in_size / 2) room.resize(o.plain.in_size / 2);
    Words* to = room.data();
    for (int64_t g = 0; g < o.plain.in_size / o.group; g++) {
        panel += (1 + o.shifted) * PANEL * sizeof(typename ScaleOf<T>::Type);
#pragma GCC unroll 4
        for (int64_t k = 0; k < o.group; k += WORD_CODES, panel += PANEL * sizeof(uint32_t), to += 4) {
            __builtin_prefetch(panel + PANEL_AHEAD);
            __builtin_prefetch(panel + PANEL_AHEAD + PANEL * sizeof(uint32_t) / 2);
            Words codes[2];
            std::memcpy(codes, panel, sizeof(codes));
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) to[i] = table.look_up(codes[i % 2] >> (i / 2 * 4) & BYTE_CODES);
        }
    }
    return room.data();
}

}  // namespace penstock
