// Products of queries and keys, and of weights and values: any number of rows times vectors of 16.
#pragma once

#include <type_traits>

#include "matrix_unit.h"
#include "simd.h"

namespace penstock {

// Factors are words of four bytes: pairs of bfloat16 if the processor multiplies them, else float32.
template <class T>
constexpr int64_t PER_WORD =
#if defined(__AVX512BF16__)
    std::is_same_v<T, BFloat16> ? 2 : 1;
#else
    1;
#endif

inline Words load_words(const uint32_t* from) {
    Words x;
    std::memcpy(&x, from, sizeof(x));
    return x;
}

inline void store_words(uint32_t* to, Words x) { std::memcpy(to, &x, sizeof(x)); }

// Factors of a product: a[row * a_row + step] times b[step * b_step + vector * b_vector + lane].
struct Factors {
    const uint32_t* a;
    int64_t a_row;
    const uint32_t* b;
    int64_t b_step;
    int64_t b_vector;
    int64_t steps;
};

// Height of a tile, whose sums are divided into parts, because the compiler would spill wider vectors to memory.
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

template <class T>
void dot_in_registers(Factors of, int64_t rows, int64_t vectors, float* c, int64_t c_row) {
#if defined(__AVX512F__)
    for (; vectors >= 4; vectors -= 4, of.b += 4 * of.b_vector, c += 4 * LANES) dot_rows<T, 4>(of, rows, c, c_row);
    if (vectors == 3) return dot_rows<T, 3>(of, rows, c, c_row);
    if (vectors == 2) return dot_rows<T, 2>(of, rows, c, c_row);
#endif
    for (; vectors > 0; vectors--, of.b += of.b_vector, c += LANES) dot_rows<T, 1>(of, rows, c, c_row);
}

constexpr int64_t UNIT_WORDS = UNIT_BYTES / sizeof(uint32_t);

// Whether the matrix unit computes products of this type. It computes all of them or none, because the last bits of its
// sums differ.
template <class T>
inline bool in_unit() {
    return PER_WORD<T> == 2 && has_matrix_unit();
}

// Returns the number to whose multiples the steps are padded with zeros.
template <class T>
inline int64_t step_grain() {
    return in_unit<T>() ? UNIT_WORDS : 1;
}

inline void dot_in_unit(MatrixUnit& unit, const Factors& of, int64_t rows, int64_t vectors, float* c, int64_t c_row) {
    constexpr int64_t WORD = sizeof(uint32_t);
    for (int64_t row = 0; row < rows; row += UNIT_ROWS)
        for (int64_t vector = 0; vector < vectors; vector += 2) {
            const UnitFactors factors{
                .a = of.a + row * of.a_row,
                .a_stride = of.a_row * WORD,
                .b = of.b + vector * of.b_vector,
                .b_stride = of.b_step * WORD,
                .b_step = UNIT_WORDS * of.b_step * WORD,
                .b_next = of.b_vector * WORD,
                .steps = of.steps / UNIT_WORDS,
            };
            unit.multiply<Numbers::BRAIN_FLOATS>(factors, std::min(UNIT_ROWS, rows - row), vector + 1 < vectors,
                                                 c + row * c_row + vector * LANES, c_row, [] {});
        }
}

// Transposes sums [16, 4] to scores[row * stride + key], for the first `rows` rows.
inline void turn_over(const float* sums, int64_t rows, float* scores, int64_t stride) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t key = 0; key < LANES; key++) scores[row * stride + key] = sums[key * UNIT_FEW + row];
}

// Computes c[row * c_row + vector * 16 + lane] in float32 for all rows and vectors.
template <class T>
inline void dot_all(MatrixUnit& unit, const Factors& of, int64_t rows, int64_t vectors, float* c, int64_t c_row) {
    if (in_unit<T>()) return dot_in_unit(unit, of, rows, vectors, c, c_row);
    dot_in_registers<T>(of, rows, vectors, c, c_row);
}

}  // namespace penstock
