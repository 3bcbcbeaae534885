// The matrix unit of a processor with AMX. The unit has eight tiles of 16 rows of 64 bytes. This code uses four tiles
// for sums (two by two), two tiles for rows of a, and two tiles for columns of b.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define PENSTOCK_MATRIX_UNIT
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace penstock {

constexpr int64_t UNIT_LINES = 16;   // lines of a tile
constexpr int64_t UNIT_BYTES = 64;   // bytes of a line, which are one step in depth
constexpr int64_t UNIT_ROWS = 2 * UNIT_LINES;
constexpr int64_t UNIT_COLUMNS = 32;
constexpr int64_t UNIT_FEW = 4;  // columns of `multiply_few`

// Operands of a product of a [rows, steps of 64 bytes] and b. A line of b has four bytes in depth of each of 16
// columns.
struct UnitFactors {
    const void* a;
    int64_t a_stride;  // bytes between rows
    const void* b;
    int64_t b_stride;  // bytes between the lines of a tile of b
    int64_t b_step;    // bytes between the tiles of b of consecutive steps
    int64_t b_next;    // bytes between the first 16 columns of b and the second
    int64_t steps;
    int64_t ahead = 0;  // bytes from b to the memory that is needed next, of which this call prefetches a part
    int64_t part = 0;   // index of the part that this call prefetches
    int64_t parts = 0;  // number of equal parts of that memory; 0: no prefetch
};

// BRAIN_FLOATS: bfloat16 with sums in float32. BYTES: signed times unsigned 8-bit integers with sums in int32.
enum class Numbers { BRAIN_FLOATS, BYTES };

#if defined(PENSTOCK_MATRIX_UNIT)

// Requests the system's permission to use the matrix unit, once. Returns whether this process may use it.
inline bool has_matrix_unit() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of Linux's arch_prctl
    static const bool permitted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return permitted;
}

// Use of the matrix unit by one thread. The destructor restores the unit's previous state.
class MatrixUnit {
public:
    MatrixUnit() = default;
    MatrixUnit(const MatrixUnit&) = delete;
    ~MatrixUnit() {
        if (upper_) _tile_release();
    }

    // Computes sums[row * stride + column] for at most 32 rows and for 16 columns, or for 32 columns if `wide`. Each
    // sum is added in order of depth. `meanwhile()` is called once per step, so that the core does other work while the
    // unit is busy.
    template <Numbers NUMBERS, class Sum, class Meanwhile>
    void multiply(const UnitFactors& of, int64_t rows, bool wide, Sum* sums, int64_t stride, Meanwhile&& meanwhile) {
        set_heights(std::min(rows, UNIT_LINES), std::max<int64_t>(rows - UNIT_LINES, 0));
        asm volatile("" ::: "memory");  // the compiler does not know that the instructions below read memory
        if (lower_)
            wide ? multiply_tiles<NUMBERS, true, true>(of, sums, stride, meanwhile)
                 : multiply_tiles<NUMBERS, true, false>(of, sums, stride, meanwhile);
        else
            wide ? multiply_tiles<NUMBERS, false, true>(of, sums, stride, meanwhile)
                 : multiply_tiles<NUMBERS, false, false>(of, sums, stride, meanwhile);
    }

    // Computes the sums [16, 4] of 16 rows of bfloat16, a [16, words], and four columns, b [words, 4]. The sums are
    // bit-identical to the sums of the transposed product.
    void multiply_few(const void* a, int64_t a_stride, const uint32_t* b, int64_t words, float* sums) {
        constexpr int64_t WORD = sizeof(uint32_t), LINE = UNIT_FEW * WORD;
        const int64_t whole = words / UNIT_LINES, rest = words % UNIT_LINES;
        set_rest(rest);
        asm volatile("" ::: "memory");
        const char* const from = static_cast<const char*>(a);
        _tile_zero(0);
        for (int64_t step = 0; step < whole; step++, b += UNIT_LINES * UNIT_FEW) {
            _tile_loadd(4, from + step * UNIT_BYTES, a_stride);
            _tile_loadd(6, b, LINE);
            _tile_dpbf16ps(0, 4, 6);
        }
        if (rest) {
            _tile_loadd(5, from + whole * UNIT_BYTES, a_stride);
            _tile_loadd(7, b, LINE);
            _tile_dpbf16ps(0, 5, 7);
        }
        _tile_stored(0, sums, LINE);
    }

private:
    // The current shape of the tiles. For `multiply`: the rows of a in the upper and in the lower tile. For
    // `multiply_few`: -1, and the number of words in the last step.
    int64_t upper_ = 0, lower_ = 0;

    void set_heights(int64_t upper, int64_t lower) {
        if (upper == upper_ && lower == lower_) return;
        upper_ = upper, lower_ = lower;
        const int64_t lines[] = {upper, upper, lower, lower, upper, lower, UNIT_LINES, UNIT_LINES};
        Shape shape;
        for (int tile = 0; tile < 8; tile++) shape.set(tile, lines[tile], UNIT_BYTES);
        configure(shape);
    }

    void set_rest(int64_t words) {
        if (upper_ == -1 && lower_ == words) return;
        upper_ = -1, lower_ = words;
        constexpr int64_t WORD = sizeof(uint32_t), LINE = UNIT_FEW * WORD;
        Shape shape;
        shape.set(0, UNIT_LINES, LINE);
        shape.set(4, UNIT_LINES, UNIT_BYTES);
        shape.set(6, UNIT_LINES, LINE);
        shape.set(5, words ? UNIT_LINES : 0, words * WORD);
        shape.set(7, words, LINE);
        configure(shape);
    }

    // The memory format of `ldtilecfg`.
    struct alignas(64) Shape {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t lines[16] = {};

        void set(int tile, int64_t num_lines, int64_t num_bytes) {
            lines[tile] = num_lines;
            bytes[tile] = num_lines ? num_bytes : 0;
        }
    };

    static void configure(const Shape& shape) {
        // inline assembly, because GCC 12 assumes that the intrinsic reads only eight of these bytes
        asm volatile("ldtilecfg %0" ::"m"(shape));
    }

    // Tiles 0 and 1 hold the upper sums, tiles 2 and 3 the lower sums, 4 and 5 rows of a, 6 and 7 columns of b.
    template <Numbers NUMBERS, bool LOWER, bool WIDE, class Sum, class Meanwhile>
    static void multiply_tiles(const UnitFactors& of, Sum* sums, int64_t stride, Meanwhile&& meanwhile) {
        static_assert(sizeof(Sum) == 4);
        const char *a = static_cast<const char*>(of.a), *b = static_cast<const char*>(of.b);
        const char* const lower_a = a + UNIT_LINES * of.a_stride;
        _tile_zero(0);
        if constexpr (WIDE) _tile_zero(1);
        if constexpr (LOWER) _tile_zero(2);
        if constexpr (LOWER && WIDE) _tile_zero(3);
        for (int64_t step = 0; step < of.steps; step++, b += of.b_step) {
            if (of.parts && step % of.parts == of.part)
                for (int64_t line = 0; line < 2 * UNIT_LINES; line++)
                    __builtin_prefetch(b + of.ahead + line * UNIT_BYTES, 0, 2);
            if (of.parts && of.part == 0)  // b is not in the cache: also prefetch the next step
                for (int64_t line = 0; line < 2 * UNIT_LINES; line++)
                    __builtin_prefetch(b + of.b_step + line * UNIT_BYTES);
            _tile_loadd(6, b, of.b_stride);
            // a non-temporal load, so that b stays in the L1 cache
            _tile_stream_loadd(4, a + step * UNIT_BYTES, of.a_stride);
            if constexpr (LOWER) _tile_stream_loadd(5, lower_a + step * UNIT_BYTES, of.a_stride);
            if constexpr (WIDE) _tile_loadd(7, b + of.b_next, of.b_stride);
            if constexpr (NUMBERS == Numbers::BRAIN_FLOATS) {
                _tile_dpbf16ps(0, 4, 6);
                if constexpr (WIDE) _tile_dpbf16ps(1, 4, 7);
                if constexpr (LOWER) _tile_dpbf16ps(2, 5, 6);
                if constexpr (LOWER && WIDE) _tile_dpbf16ps(3, 5, 7);
            } else {
                _tile_dpbsud(0, 4, 6);
                if constexpr (WIDE) _tile_dpbsud(1, 4, 7);
                if constexpr (LOWER) _tile_dpbsud(2, 5, 6);
                if constexpr (LOWER && WIDE) _tile_dpbsud(3, 5, 7);
            }
            meanwhile();
        }
        const int64_t bytes = stride * sizeof(Sum);
        _tile_stored(0, sums, bytes);
        if constexpr (WIDE) _tile_stored(1, sums + UNIT_LINES, bytes);
        if constexpr (LOWER) _tile_stored(2, sums + UNIT_LINES * stride, bytes);
        if constexpr (LOWER && WIDE) _tile_stored(3, sums + UNIT_LINES * stride + UNIT_LINES, bytes);
    }
};

#else

inline bool has_matrix_unit() { return false; }

class MatrixUnit {
public:
    template <Numbers NUMBERS, class Sum, class Meanwhile>
    void multiply(const UnitFactors&, int64_t, bool, Sum*, int64_t, Meanwhile&&) {}
    void multiply_few(const void*, int64_t, const uint32_t*, int64_t, float*) {}
};

#endif

}  // namespace penstock
