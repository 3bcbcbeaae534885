// Products with a model's weights (contract: ops/matmul/__init__.py).
//
// A weight [O, I] is packed in panels of 32 outputs: [O / 32][I / n][32][n], where n adjacent inputs fill a lane (one
// float32 or two bfloat16). The last panel is padded with zeros. A tile is up to MAX_TILE_ROWS rows of x times one
// panel. Its sums stay in registers over the whole depth. Therefore each sum is added in the same order for any number
// of rows, and a token's result does not depend on its batch.
#pragma once

#include <algorithm>

#include "matrix_unit.h"
#include "simd.h"
#include "small.h"
#include "step.h"

namespace penstock {

constexpr int PANEL = 2 * LANES;
#if defined(__AVX512F__)
constexpr int MAX_TILE_ROWS = 12;  // 2 sums per row: 24 of 32 registers
#elif defined(__AVX2__)
constexpr int MAX_TILE_ROWS = 2;
#else
constexpr int MAX_TILE_ROWS = 1;
#endif
// For float32 and many rows, two panels at a time are faster, because x is loaded half as often.
#if defined(__AVX512F__)
constexpr int WIDE_TILE_ROWS = 6;  // 4 sums per row
#else
constexpr int WIDE_TILE_ROWS = 0;  // no wide tiles
#endif
constexpr int64_t BLOCK_ROWS = 240;  // rows of x that stay in the cache while they are multiplied by all panels
constexpr int64_t WIDE_BLOCK = 128 << 10;  // maximum elements of x that leave room for two panels in the L2 cache
constexpr int64_t UNIT_DEPTH = UNIT_BYTES / sizeof(BFloat16);  // inputs per step of the matrix unit
static_assert(PANEL == UNIT_COLUMNS);

struct ProductOperands {
    const void* x;       // [rows, I], rows x_stride elements apart
    int64_t x_stride;
    int64_t rows;        // 0: all tokens of the step
    const void* weight;  // packed in panels
    const void* bias;    // [O] of the same type as x, or null
    void* out;           // [rows, O], contiguous
    int64_t in_size;     // I
    int64_t out_size;    // O
    int64_t activation;  // 0: none; else 1 + the `Activation` that is applied to each rounded result
};

inline Words lanes_of(const BFloat16* from) { return load_pairs(from); }
inline Floats lanes_of(const float* from) { return load(from); }
inline Words fill_lanes(const BFloat16* from) { return fill_pair(from); }
inline Floats fill_lanes(const float* from) { return fill(*from); }
inline Floats multiply_add(Floats total, Words a, Words b) { return dot_pairs(total, a, b); }
inline Floats multiply_add(Floats total, Floats a, Floats b) { return total + a * b; }

template <class T>
constexpr int LANE_SIZE = sizeof(float) / sizeof(T);

// The weights that a tile prefetches. Each step in depth prefetches two lines.
struct Ahead {
    int64_t from, pace;  // offset of the first line from the panel's start; elements between the lines of two steps
};

// sums[row] = x[row] . panel, added in order of depth, so that the number of rows does not change a result. With
// FETCHES_NEXT it also prefetches the next tile's rows. Functions of tiles are never inlined, so that each number of
// rows is compiled once per translation unit.
template <class T, int ROWS, bool FETCHES_NEXT = false>
[[gnu::noinline]] void multiply_tile(const T* x, int64_t stride, const T* panel, int64_t depth, const Ahead& ahead,
                                     Floats (*result)[2]) {
    Floats sums[ROWS][2];
    const T* needed_later = panel + ahead.from;
    const int64_t pace = ahead.pace;
    constexpr int N = LANE_SIZE<T>;
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) sums[row][0] = sums[row][1] = Floats{};
    for (int64_t k = 0; k < depth; k += N, panel += PANEL * N) {
        const auto first = lanes_of(panel), second = lanes_of(panel + LANES * N);
        __builtin_prefetch(needed_later, 0, 2);
        __builtin_prefetch(needed_later + LANES * N, 0, 2);
        needed_later += pace;
        if (FETCHES_NEXT && k % (N * LANES) == 0)
#pragma GCC unroll 16
            for (int row = ROWS; row < 2 * ROWS; row++) __builtin_prefetch(x + row * stride + k);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            const auto value = fill_lanes(x + row * stride + k);
            sums[row][0] = multiply_add(sums[row][0], first, value);
            sums[row][1] = multiply_add(sums[row][1], second, value);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) result[row][0] = sums[row][0], result[row][1] = sums[row][1];
}

// Like `multiply_tile`, for two adjacent panels. result[row] has the sums of the first panel, then of the second.
template <int ROWS>
[[gnu::noinline]] void multiply_wide_tile(const float* x, int64_t stride, const float* panel, int64_t depth,
                                          Floats (*result)[2][2]) {
    Floats sums[ROWS][4];
    constexpr int64_t AHEAD = 4 * PANEL;  // prefetch distance, from the L2 cache
    const int64_t second = PANEL * depth;
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) sums[row][0] = sums[row][1] = sums[row][2] = sums[row][3] = Floats{};
    for (int64_t k = 0; k < depth; k++, panel += PANEL) {
        const Floats weights[] = {load(panel), load(panel + LANES), load(panel + second), load(panel + second + LANES)};
        if constexpr (ROWS > WIDE_TILE_ROWS / 2) {
            fetch(panel + AHEAD, PANEL), fetch(panel + second + AHEAD, PANEL);
            if (k % LANES == 0)
#pragma GCC unroll 16
                // rows of the next tile
                for (int row = ROWS; row < 2 * ROWS; row++) __builtin_prefetch(x + row * stride + k);
        }
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            const Floats value = fill(x[row * stride + k]);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) sums[row][i] = multiply_add(sums[row][i], weights[i], value);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < 4; i++) result[row][i / 2][i % 2] = sums[row][i];
}

template <int ROWS = WIDE_TILE_ROWS>
inline void multiply_wide_rows(const ProductOperands& o, int64_t row, int64_t height, int64_t panel,
                               Floats (*sums)[2][2]) {
    if constexpr (ROWS > 0) {
        if (height != ROWS) return multiply_wide_rows<ROWS - 1>(o, row, height, panel, sums);
        const float* weight = static_cast<const float*>(o.weight) + panel * PANEL * o.in_size;
        multiply_wide_tile<ROWS>(static_cast<const float*>(o.x) + row * o.x_stride, o.x_stride, weight, o.in_size, sums);
    }
}

constexpr int ACTIVATED_ROWS = 3;  // rows to which an activation is applied at once

// Applies an activation to the results of rows row .. row + height - 1 of a panel and stores them. The rows' sums are
// `apart` pairs apart. Several rows are computed at once, because a single activation is a long chain of dependent
// instructions.
template <class T, class Out, Activation KIND, int ROWS = ACTIVATED_ROWS>
void store_activated(const Floats (*sums)[2], int64_t apart, int64_t height, const ProductOperands& o, int64_t row,
                     int64_t column) {
    constexpr bool SHORT = sizeof(Out) == sizeof(BFloat16);
    const T* bias = static_cast<const T*>(o.bias);
    Out* out = static_cast<Out*>(o.out) + row * o.out_size + column;
    const int64_t counts[] = {std::min<int64_t>(LANES, o.out_size - column),
                              std::clamp<int64_t>(o.out_size - column - LANES, 0, LANES)};
    Floats added[2]{};
    for (int half = 0; bias && half < 2; half++) added[half] = load(bias + column + half * LANES, counts[half]);
    for (; height >= ROWS; height -= ROWS, sums += ROWS * apart, out += ROWS * o.out_size, row += ROWS) {
        Floats x[2 * ROWS];
#pragma GCC unroll 16
        for (int i = 0; i < 2 * ROWS; i++) x[i] = rounded(out, sums[i / 2 * apart][i % 2] + added[i % 2]);
        activate_all<KIND, SHORT>(x);
#pragma GCC unroll 16
        for (int i = 0; i < 2 * ROWS; i++) store(out + i / 2 * o.out_size + i % 2 * LANES, x[i], counts[i % 2]);
    }
    if constexpr (ROWS > 1)
        if (height > 0) store_activated<T, Out, KIND, 1>(sums, apart, height, o, row, column);
}

template <class T, class Out>
constexpr auto store_activated_by(Activation kind) {
    switch (kind) {
        case SILU: return store_activated<T, Out, SILU>;
        case GELU: return store_activated<T, Out, GELU>;
        case GELU_TANH: return store_activated<T, Out, GELU_TANH>;
        case RELU: return store_activated<T, Out, RELU>;
        case RELU_SQUARED: return store_activated<T, Out, RELU_SQUARED>;
        case CLAMPED_SWIGLU: return store_activated<T, Out, CLAMPED_SWIGLU>;
        case LOGISTIC: return store_activated<T, Out, LOGISTIC>;
    }
    __builtin_unreachable();
}

template <class T, class Out>
inline void store_sums(const Floats (&sums)[2], const T* bias, Out* out, int64_t column, int64_t out_size) {
    if (column + PANEL <= out_size) {
        // In halves: storing whole cache lines at once is slower if many rows are written.
        store(out + column, bias ? sums[0] + load(bias + column) : sums[0]);
        store(out + column + LANES, bias ? sums[1] + load(bias + column + LANES) : sums[1]);
        return;
    }
    for (int64_t lane = 0; column + lane < out_size; lane++) {
        const float sum = sums[lane / LANES][lane % LANES];
        narrow(out + column + lane, sum + (bias ? widen(bias[column + lane]) : 0.0f));
    }
}

// Computes the sums of rows row .. row + height - 1 of a panel.
template <class T, int ROWS = MAX_TILE_ROWS, bool FETCHES_NEXT = false>
inline void multiply_rows(const ProductOperands& o, int64_t row, int64_t height, const Ahead& ahead, int64_t panel,
                          Floats (*sums)[2]) {
    if constexpr (ROWS > 0) {
        if (height != ROWS) return multiply_rows<T, ROWS - 1>(o, row, height, ahead, panel, sums);
        const T* weight = static_cast<const T*>(o.weight) + panel * PANEL * o.in_size;
        const T* x = static_cast<const T*>(o.x) + row * o.x_stride;
        multiply_tile<T, ROWS, FETCHES_NEXT>(x, o.x_stride, weight, o.in_size, ahead, sums);
    }
}

// Calls work(row, height) for tiles of rows first .. end - 1 with nearly equal heights of at most HIGHEST.
template <int HIGHEST, class Work>
inline void in_tiles(int64_t first, int64_t end, const Work& work) {
    int64_t tiles = (end - first + HIGHEST - 1) / HIGHEST;
    for (int64_t row = first; row < end; tiles--) {
        const int64_t height = (end - row + tiles - 1) / tiles;
        work(row, height);
        row += height;
    }
}

// Calls work(first row, end, panel) for every panel and block of rows, as tasks of the threads.
template <class Work>
inline void share_panels(ThreadGroup& threads, int64_t rows, int64_t out_size, const Work& work) {
    const int64_t panels = (out_size + PANEL - 1) / PANEL;
    const int64_t tasks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS * panels;
    threads.share(tasks, [&](int64_t task) {
        const int64_t first = task / panels * BLOCK_ROWS;
        work(first, std::min(first + BLOCK_ROWS, rows), task % panels);
    });
}

inline int64_t rows_of(const ProductOperands& o, const Step& step) { return o.rows ? o.rows : step.num_tokens; }

// Finished sums of the matrix unit. They are stored piece by piece while the unit computes the next sums.
template <class Sum, class Put>
class Finished {
public:
    explicit Finished(const Put& put) : put_(put) {}
    ~Finished() { put_away(height_); }

    // Memory for the next sums.
    Sum* room() { return sums_[side_ ^ 1][0]; }

    // Takes over the sums in `room`, which are finished: `height` rows from `row` on, of this panel. The next `calls`
    // calls of this object store them.
    void take(int64_t row, int64_t height, int64_t panel, int64_t calls) {
        put_away(height_);
        side_ ^= 1;
        row_ = row, height_ = height, panel_ = panel, done_ = 0;
        portion_ = (height + calls - 1) / calls;
    }

    void operator()() { put_away(std::min(height_, done_ + portion_)); }

private:
    const Put& put_;
    alignas(64) Sum sums_[2][UNIT_ROWS][PANEL];
    int side_ = 0;
    int64_t row_ = 0, height_ = 0, panel_ = 0, done_ = 0, portion_ = 0;

    void put_away(int64_t end) {
        for (; done_ < end; done_++) put_(row_ + done_, panel_, sums_[side_][done_]);
    }
};

// Operands of a product of rows row .. end - 1 of a with a panel. The depth is `steps` steps of the matrix unit.
inline UnitFactors factors_of(const void* a, int64_t a_stride, const void* panel, int64_t steps, int64_t first,
                              int64_t row, int64_t end) {
    constexpr int64_t LANE = sizeof(float);
    return {
        .a = a,
        .a_stride = a_stride,
        .b = panel,
        .b_stride = PANEL * LANE,
        .b_step = UNIT_LINES * PANEL * LANE,
        .b_next = LANES * LANE,
        .steps = steps,
        .ahead = steps * UNIT_LINES * PANEL * LANE,
        .part = (row - first) / UNIT_ROWS,
        .parts = (end - first + UNIT_ROWS - 1) / UNIT_ROWS,
    };
}

// Multiplies with the matrix unit; a panel has the width of the unit.
template <class Share, class Put>
inline void multiply_in_unit(const ProductOperands& o, const Share& share, const Put& put) {
    const int64_t steps = o.in_size / UNIT_DEPTH;
    const auto put_sums = [&](int64_t row, int64_t panel, const float* sums) {
        put(row, panel, {load(sums), load(sums + LANES)});
    };
    Finished<float, decltype(put_sums)> finished(put_sums);
    MatrixUnit unit;
    share([&](int64_t first, int64_t end, int64_t panel) {
        const BFloat16* weight = static_cast<const BFloat16*>(o.weight) + panel * PANEL * o.in_size;
        for (int64_t row = first; row < end; row += UNIT_ROWS) {
            const int64_t height = std::min(UNIT_ROWS, end - row);
            const BFloat16* x = static_cast<const BFloat16*>(o.x) + row * o.x_stride;
            const UnitFactors factors = factors_of(x, o.x_stride * int64_t(sizeof(*x)), weight, steps, first, row, end);
            unit.multiply<Numbers::BRAIN_FLOATS>(factors, height, true, finished.room(), PANEL, finished);
            finished.take(row, height, panel, steps);
        }
    });
}

// Calls put(row, panel, sums) for each row of a tile, whose sums are `apart` pairs apart, or put.tile(..) for all rows
// at once.
template <class Put>
inline void put_tile(const Put& put, int64_t row, int64_t height, int64_t panel, const Floats (*sums)[2], int64_t apart) {
    if constexpr (requires { put.tile(row, height, panel, sums, apart); })
        put.tile(row, height, panel, sums, apart);
    else
        for (int64_t r = 0; r < height; r++) put(row + r, panel, sums[r * apart]);
}

// Returns what the tile with rows row .. row + height - 1 of first .. end - 1 prefetches. If there is a single tile, it
// prefetches its own panel some steps ahead. If there are several tiles, their panel is already in the cache, and each
// of the last two tiles prefetches half of the next panel.
template <class T>
inline Ahead ahead_of(int64_t first, int64_t row, int64_t height, int64_t end, int64_t depth) {
    constexpr int64_t STEP = PANEL * LANE_SIZE<T>, LEAD = 64;  // LEAD: steps in depth
    const int64_t left = end - row - height;
    if (end - first <= MAX_TILE_ROWS) return {LEAD * STEP, STEP};
    if (left > MAX_TILE_ROWS) return {0, STEP};
    return {PANEL * depth + (left ? 0 : PANEL * depth / 2), STEP / 2};
}

// Calls put(row, panel, sums) for rows first .. end - 1 and a panel.
template <class T, class Put>
inline void multiply_panel(const ProductOperands& o, int64_t first, int64_t end, int64_t panel, const Put& put) {
    // Rows of x at multiples of this distance map to so few sets of the L1 cache that it cannot hold the rows of two
    // tiles.
    constexpr int64_t CROWDED_BYTES = 2048;
    const bool fetches_next = o.x_stride * int64_t(sizeof(T)) % CROWDED_BYTES != 0;
    in_tiles<MAX_TILE_ROWS>(first, end, [&](int64_t row, int64_t height) {
        Floats sums[MAX_TILE_ROWS][2];
        const Ahead ahead = ahead_of<T>(first, row, height, end, o.in_size);
        if (fetches_next && height == MAX_TILE_ROWS && row + height < end)
            multiply_rows<T, MAX_TILE_ROWS, true>(o, row, height, ahead, panel, sums);
        else
            multiply_rows<T>(o, row, height, ahead, panel, sums);
        put_tile(put, row, height, panel, sums, 1);
    });
}

// Calls put(row, panel, sums) for the rows and panels that share(work) gives to this thread.
template <class T, class Share, class Put>
inline void multiply_over(const ProductOperands& o, const Share& share, const Put& put) {
    if constexpr (sizeof(T) == sizeof(BFloat16))
        if (has_matrix_unit() && o.in_size % UNIT_DEPTH == 0) return multiply_in_unit(o, share, put);
    share([&](int64_t first, int64_t end, int64_t panel) { multiply_panel<T>(o, first, end, panel, put); });
}

// Calls put(row, panel, sums) for all rows and panels, two panels at a time.
template <class Put>
inline void multiply_wide(const ProductOperands& o, ThreadGroup& threads, int64_t rows, const Put& put) {
    const int64_t panels = (o.out_size + PANEL - 1) / PANEL, pairs = (panels + 1) / 2;
    const int64_t fitting = std::clamp<int64_t>(WIDE_BLOCK / o.in_size, 7 * MAX_TILE_ROWS, BLOCK_ROWS);
    const int64_t blocks = (rows + fitting - 1) / fitting, block = round_up((rows + blocks - 1) / blocks, WIDE_TILE_ROWS);
    threads.share((rows + block - 1) / block * pairs, [&](int64_t task) {
        const int64_t first = task / pairs * block, end = std::min(first + block, rows), panel = task % pairs * 2;
        if (panel + 1 == panels) return multiply_panel<float>(o, first, end, panel, put);
        in_tiles<WIDE_TILE_ROWS>(first, end, [&](int64_t row, int64_t height) {
            Floats sums[WIDE_TILE_ROWS][2][2];
            multiply_wide_rows(o, row, height, panel, sums);
            for (int side = 0; side < 2; side++) put_tile(put, row, height, panel + side, &sums[0][side], 2);
        });
    });
}

// Whether two panels and x fit in the L2 cache together, and there are still enough tasks for every thread.
inline bool are_wide(const ProductOperands& o, const ThreadGroup& threads, int64_t rows) {
    constexpr int64_t TASKS = 8;  // minimum per thread
    return 2 * PANEL * o.in_size <= WIDE_BLOCK && rows / BLOCK_ROWS * (o.out_size / (2 * PANEL)) >= TASKS * threads.size;
}

// Calls put(row, panel, sums) for all rows and panels.
template <class T, class Put>
inline void multiply(const ProductOperands& o, ThreadGroup& threads, int64_t rows, const Put& put) {
    if constexpr (WIDE_TILE_ROWS > 0 && sizeof(T) == sizeof(float))
        if (are_wide(o, threads, rows)) return multiply_wide(o, threads, rows, put);
    multiply_over<T>(o, [&](const auto& work) { share_panels(threads, rows, o.out_size, work); }, put);
}

// Stores sums after an activation, which is chosen once for all sums.
struct Activated {
    const ProductOperands& o;
    void (*store)(const Floats (*sums)[2], int64_t apart, int64_t height, const ProductOperands& o, int64_t row,
                  int64_t column);

    void operator()(int64_t row, int64_t panel, const Floats (&sums)[2]) const { store(&sums, 1, 1, o, row, panel * PANEL); }

    void tile(int64_t row, int64_t height, int64_t panel, const Floats (*sums)[2], int64_t apart) const {
        store(sums, apart, height, o, row, panel * PANEL);
    }
};

template <class T, class Out>
void product(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const ProductOperands*>(operands);
    const int64_t rows = rows_of(o, step);
    if (o.activation)
        return multiply<T>(o, threads, rows, Activated{o, store_activated_by<T, Out>(Activation(o.activation - 1))});
    Out* const out = static_cast<Out*>(o.out);
    multiply<T>(o, threads, rows, [&](int64_t row, int64_t panel, const Floats (&sums)[2]) {
        store_sums<T, Out>(sums, static_cast<const T*>(o.bias), out + row * o.out_size, panel * PANEL, o.out_size);
    });
}

// Packs a weight in panels. A task is a panel.
struct PackOperands {
    const void* weight;  // [O, I]
    void* packed;
    int64_t in_size, out_size;
};

template <class T>
void pack(const void* operands, const Step&, ThreadGroup& threads) {
    constexpr int N = LANE_SIZE<T>;
    const auto& o = *static_cast<const PackOperands*>(operands);
    const int64_t panels = (o.out_size + PANEL - 1) / PANEL;
    for (int64_t panel; (panel = threads.take()) < panels;) {
        const T* weight = static_cast<const T*>(o.weight) + panel * PANEL * o.in_size;
        T* to = static_cast<T*>(o.packed) + panel * PANEL * o.in_size;
        const int64_t filled = std::min<int64_t>(PANEL, o.out_size - panel * PANEL);
        for (int64_t k = 0; k < o.in_size; k += N)
            for (int64_t column = 0; column < PANEL; column++, to += N)
                for (int64_t n = 0; n < N; n++) to[n] = column < filled ? weight[column * o.in_size + k + n] : T{};
    }
}

}  // namespace penstock
