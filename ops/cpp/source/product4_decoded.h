// Products of many unrounded rows with grouped weights. A panel is decoded once, to pairs of bfloat16 as in product.h,
// and then multiplied by all tiles of rows. Sums have the same order as in tiles that decode in registers (group by
// group, pair by pair), so results are bit-identical.
#pragma once

#include "product4_octets.h"
#include "product4_wide.h"

namespace penstock {

// Position of the first input of each of the four pairs of a word, among its eight inputs. It differs for codes of more
// than 4 bits.
template <int BITS>
constexpr int PAIR_PLACES[] = {0, BITS == 4 ? 2 : 4, BITS == 4 ? 4 : 2, 6};

// Whether tiles of T multiply pairs in lanes.
template <class T>
constexpr bool IN_PAIRS = sizeof(T) == sizeof(BFloat16) && CODE_LANES == LANES;

// Maximum number of rows of a tile with a decoded panel. A few rows more than fit in the registers are cheap to spill.
constexpr int MAX_PAIRS_ROWS = std::min(MAX_TILE_ROWS, 8);

// Maximum number of rows for which tiles that decode in registers are faster. Without tiles that multiply in pairs, it
// is the size of a whole tile.
template <class T, int BITS>
constexpr int MAX_UNDECODED = std::min(MAX_TILE_ROWS, !IN_PAIRS<T> ? MAX_TILE_ROWS
                                                      : BITS == 8  ? 5
                                                      : BITS == 6  ? 2
                                                      : BITS == 5  ? 3
                                                                   : 7);

// Decodes a panel to [I / 2][32] pairs in this thread's memory.
template <class T, int BITS>
const Words* decode_pairs(const Product4Operands& o, const Table& table, const uint8_t* panel) {
    typedef Codes<BITS> Code;
    thread_local std::vector<Words> room;
    if (int64_t(room.size()) < o.plain.in_size) room.resize(o.plain.in_size);
    const Pairs<BITS> pairs;
    Words* to = room.data();
    for (int64_t g = 0; g < o.plain.in_size / o.group; g++) {
        panel += (1 + o.shifted) * PANEL * sizeof(typename ScaleOf<T>::Type);
        for (int64_t k = 0; k < o.group; k += Code::DEPTH, panel += Code::UNIT) {
#pragma GCC unroll 16
            for (int64_t line = 0; line < Code::UNIT; line += 64) __builtin_prefetch(panel + PANEL_AHEAD + line);
#pragma GCC unroll 2
            for (int e = 0; e < Code::DEPTH / WORD_CODES; e++, to += 8)
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) {
                    const int pair = i / 2, output = i % 2 * LANES;
                    if constexpr (BITS == 4)
                        to[i] = decode(table, Code::words(panel, output), 2 * pair, BFloat16{});
                    else
                        to[i] = pairs.of(Code::template bytes<Words>(panel, e, pair / 2, output), pair % 2);
                }
        }
    }
    return room.data();
}

// Like multiply_tile4, for a decoded panel. Prefetches the next panel.
template <class T, int BITS, int ROWS>
[[gnu::noinline]] void multiply_pairs(const Product4Operands& o, int64_t row, const uint8_t* panel, const Words* numbers,
                                      Floats (*result)[2]) {
    typedef typename ScaleOf<T>::Type Scale;
    const int64_t groups = o.plain.in_size / o.group, group = o.group, stride = o.plain.x_stride;
    const int64_t bytes = panel_bytes4<T>(group, group, o.shifted, BITS), ahead = groups * bytes;
    const bool shifted = o.shifted;
    const T* x = static_cast<const T*>(o.plain.x) + row * stride;
    Floats sums[ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = Floats{};
    for (int64_t g = 0; g < groups; g++, panel += bytes) {
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(panel + ahead + line, 0, 2);
        Floats parts[ROWS][2];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) parts[r][0] = parts[r][1] = Floats{};
        for (int64_t k = 0; k < group; k += WORD_CODES, x += WORD_CODES, numbers += 8) {
#pragma GCC unroll 4
            for (int pair = 0; pair < 4; pair++)
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    const Words value = fill_pair(x + r * stride + PAIR_PLACES<BITS>[pair]);
                    parts[r][0] = dot_pairs(parts[r][0], numbers[2 * pair], value);
                    parts[r][1] = dot_pairs(parts[r][1], numbers[2 * pair + 1], value);
                }
        }
        const Scale* scales = reinterpret_cast<const Scale*>(panel);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const Floats scale = load(scales + half * LANES);
            const Floats shift = shifted ? load(scales + PANEL + half * LANES) : Floats{};
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                sums[r][half] = fused(parts[r][half], scale, sums[r][half]);
                if (shifted) sums[r][half] = fused(shift, fill(o.group_sums[(row + r) * groups + g]), sums[r][half]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) result[r][0] = sums[r][0], result[r][1] = sums[r][1];
}

template <class T, int BITS, int ROWS = MAX_PAIRS_ROWS>
inline void multiply_rows_pairs(const Product4Operands& o, int64_t row, int64_t height, const uint8_t* panel,
                                const Words* numbers, Floats (*sums)[2]) {
    if constexpr (ROWS > 0) {
        if (height != ROWS) return multiply_rows_pairs<T, BITS, ROWS - 1>(o, row, height, panel, numbers, sums);
        multiply_pairs<T, BITS, ROWS>(o, row, panel, numbers, sums);
    }
}

template <class T, int BITS, int ROWS = MAX_UNDECODED<T, BITS>>
inline void multiply_rows_codes(const Product4Operands& o, int64_t row, int64_t height, const uint8_t* panel,
                                Floats (*sums)[2]) {
    if constexpr (ROWS > 0) {
        if (height != ROWS) return multiply_rows_codes<T, BITS, ROWS - 1>(o, row, height, panel, sums);
        multiply_codes<T, BITS, ROWS>(o, row, panel, sums);
    }
}

}  // namespace penstock
