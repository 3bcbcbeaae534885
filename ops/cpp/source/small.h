// Operations on single tokens: norms, rotary embedding, gated activations, cache writes. Copies of pages. Contracts:
// ops/norm, ops/rope, ops/activation, ops/kv.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "float8.h"
#include "simd.h"
#include "step.h"

namespace penstock {

// Prefetch distance for data that other cores have written, for which the hardware prefetcher starts too late.
constexpr int64_t TOKENS_AHEAD = 2;
constexpr int64_t GATE_AHEAD = 1024;  // prefetch distance in elements

struct NormOperands {
    const void* x;         // `lines` vectors of `size` per token; tokens `stride` elements apart
    void* residual;        // receives the sum x + residual; contiguous; null: no residual
    const void* weight;    // [size], or [lines, size]
    const void* bias;      // [size], or [lines, size]; or null
    void* out;             // contiguous
    int64_t tokens;        // 0: all tokens of the step
    int64_t lines;
    int64_t stride;
    int64_t size;
    int64_t weight_stride; // elements from the weight of one line to the next; 0: all lines share one weight
    int64_t centred;       // subtract the mean first
    float eps;
    float offset;          // added to the weight
};

// Sum of squares of x - mean. It uses two alternating sums, so that an addition need not wait for the previous one.
template <class T>
inline float squares_about(const T* x, int64_t size, float mean) {
    Floats squares{}, others{};
    int64_t k = 0;
    for (; k + 2 * LANES <= size; k += 2 * LANES) {
        const Floats value = load(x + k) - mean, other = load(x + k + LANES) - mean;
        squares += value * value, others += other * other;
    }
    in_vectors(size - k, [&](int64_t i, int64_t count) {
        Floats value = load(x + k + i, count) - mean;
        for (int64_t lane = count; lane < LANES; lane++) value[lane] = 0;
        squares += value * value;
    });
    return sum(squares + others);
}

template <class T>
void norm_line(const T* x, T* residual, const T* weight, const T* bias, T* out, const NormOperands& o) {
    const int64_t size = o.size;
    Floats squares{}, totals{};
    in_vectors(size, [&](int64_t k, int64_t count) {
        // prefetch the next line of x, and this line of out before it is written
        fetch(x + k + size, 1), fetch_to_write(out + k, 1);
        if (residual) fetch_to_write(residual + k + size, 1);
        Floats value = load(x + k, count);
        if (residual) value = store_rounded(residual + k, value + load(residual + k, count), count);
        squares += value * value;
        totals += value;
    });
    const T* from = residual ? residual : x;
    const float mean = o.centred ? sum(totals) / float(size) : 0.0f;
    const float total = o.centred ? squares_about(from, size, mean) : sum(squares);
    const float factor = 1.0f / std::sqrt(total / float(size) + o.eps);
    in_vectors(size, [&](int64_t k, int64_t count) {
        const Floats normed = (load(from + k, count) - mean) * factor * (load(weight + k, count) + o.offset);
        store(out + k, bias ? normed + load(bias + k, count) : normed, count);
    });
}

template <class T>
void norm(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const NormOperands*>(operands);
    const int64_t tokens = o.tokens ? o.tokens : step.num_tokens;
    threads.share(tokens, [&](int64_t token) {
        for (int64_t line = 0; line < o.lines; line++) {
            const int64_t first = (token * o.lines + line) * o.size;
            const T* x = static_cast<const T*>(o.x) + token * o.stride + line * o.size;
            T* residual = o.residual ? static_cast<T*>(o.residual) + first : nullptr;
            const T* weight = static_cast<const T*>(o.weight) + line * o.weight_stride;
            const T* bias = o.bias ? static_cast<const T*>(o.bias) + line * o.weight_stride : nullptr;
            norm_line<T>(x, residual, weight, bias, static_cast<T*>(o.out) + first, o);
        }
    });
}

struct AddOperands {
    const void* x;      // [tokens, size], contiguous
    void* y;            // [tokens, size], contiguous; receives the sum
    const void* gate;   // one number per token; x is multiplied by its sigmoid; or null
    int64_t tokens;     // 0: all tokens of the step
    int64_t size;
    float scale;        // factor of x
};

template <class T>
void add(const void* operands, const Step& step, ThreadGroup& threads) {
    constexpr int64_t PART = 1024;
    const auto& o = *static_cast<const AddOperands*>(operands);
    const int64_t tokens = o.tokens ? o.tokens : step.num_tokens;
    const int64_t parts = (o.size + PART - 1) / PART;  // a single token is divided among threads too
    threads.share(tokens * parts, [&](int64_t task) {
        const int64_t token = task / parts, first = task % parts * PART;
        float scale = o.scale;
        if (o.gate) scale /= 1.0f + std::exp(-widen(static_cast<const T*>(o.gate)[token]));
        const T* x = static_cast<const T*>(o.x) + token * o.size + first;
        T* y = static_cast<T*>(o.y) + token * o.size + first;
        in_vectors(std::min(PART, o.size - first), [&](int64_t k, int64_t count) {
            store(y + k, load(x + k, count) * scale + load(y + k, count), count);
        });
    });
}

struct RotateOperands {
    void* q;             // [T, H, D], in place, tokens q_stride elements apart, heads D apart
    void* k;             // [T, K, D], in place, strides as for q
    const float* table;  // [N, R]: cosines, then sines
    int64_t q_stride, k_stride;
    int64_t num_heads, num_kv_heads;
    int64_t head_dim;    // D, or the distance between heads if that is larger
    int64_t size;        // R
    int64_t interleaved;
    int64_t by_token;    // whether the table has one line per token instead of one per position
};

template <class T>
inline void rotate_halves(T* head, const float* cosines, const float* sines, int64_t half) {
    in_vectors(half, [&](int64_t i, int64_t count) {
        const Floats a = load(head + i, count), b = load(head + half + i, count);
        const Floats cosine = load(cosines + i, count), sine = load(sines + i, count);
        store(head + i, a * cosine - b * sine, count);
        store(head + half + i, b * cosine + a * sine, count);
    });
}

template <class T>
inline void rotate_neighbours(T* head, const float* cosines, const float* sines, int64_t half) {
    const Ints twice = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
    const Ints other = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
    const Floats signs = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
    in_vectors(2 * half, [&](int64_t i, int64_t count) {
        const Floats x = load(head + i, count);
        const Floats cosine = __builtin_shuffle(load(cosines + i / 2, count / 2), twice);
        const Floats sine = __builtin_shuffle(load(sines + i / 2, count / 2), twice);
        store(head + i, x * cosine + __builtin_shuffle(x, other) * (sine * signs), count);
    });
}

template <class T>
inline void rotate_heads(T* heads, const float* angles, const RotateOperands& o, int64_t num_heads) {
    const int64_t half = o.size / 2;
    for (T* head = heads; head < heads + num_heads * o.head_dim; head += o.head_dim)
        o.interleaved ? rotate_neighbours(head, angles, angles + half, half)
                      : rotate_halves(head, angles, angles + half, half);
}

template <class T>
inline void rotate_token(const RotateOperands& o, const Step& step, int64_t token) {
    const float* angles = o.table + (o.by_token ? token : step.positions[token]) * o.size;
    rotate_heads(static_cast<T*>(o.q) + token * o.q_stride, angles, o, o.num_heads);
    rotate_heads(static_cast<T*>(o.k) + token * o.k_stride, angles, o, o.num_kv_heads);
}

template <class T>
void rotate(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const RotateOperands*>(operands);
    threads.share(step.num_tokens, [&](int64_t token) { rotate_token<T>(o, step, token); });
}

constexpr int64_t NUM_AXES = 3;  // axes of a position: time, height and width

struct AnglesOperands {
    const float* table;          // [N, R]: cosines, then sines
    const int64_t* positions;    // [3, T], axes `axis_stride` elements apart
    const int32_t* axis_of_pair; // [R / 2]
    float* out;                  // [T, R]
    int64_t axis_stride;
    int64_t size;                // R
};

inline void angles(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const AnglesOperands*>(operands);
    const int64_t half = o.size / 2;
    threads.share(step.num_tokens, [&](int64_t token) {
        float* to = o.out + token * o.size;
        for (int64_t pair = 0; pair < half; pair++) {
            const float* line = o.table + o.positions[o.axis_of_pair[pair] * o.axis_stride + token] * o.size;
            to[pair] = line[pair];
            to[half + pair] = line[half + pair];
        }
    });
}

struct StoreOperands {
    const void* k;    // [T, K, D], tokens `k_stride` elements apart
    const void* v;
    void* k_pool;     // [P, K, page, D]
    void* v_pool;
    int64_t k_stride, v_stride;
    int64_t num_kv_heads, head_dim;
    const int64_t* slot_mapping;  // slots of a pool with its own pages; null: the step's slots
    CacheType type;               // of both pools
    float k_steps, v_steps;       // values are multiplied by 1 / k_scale, 1 / v_scale
};

// Calls work(pool, at, from, steps) for the keys and the values of each head of a token.
template <class T, class Work>
inline void each_stored(const StoreOperands& o, const Step& step, int64_t token, const Work& work) {
    const int64_t slot = (o.slot_mapping ? o.slot_mapping : step.slot_mapping)[token], page = slot / step.page_size, offset = slot % step.page_size;
    const T* k = static_cast<const T*>(o.k) + token * o.k_stride;
    const T* v = static_cast<const T*>(o.v) + token * o.v_stride;
    for (int64_t h = 0; h < o.num_kv_heads; h++) {
        const int64_t at = ((page * o.num_kv_heads + h) * step.page_size + offset) * o.head_dim;
        work(o.k_pool, at, k + h * o.head_dim, o.k_steps);
        work(o.v_pool, at, v + h * o.head_dim, o.v_steps);
    }
}

template <class T>
inline void store_token(const StoreOperands& o, const Step& step, int64_t token) {
    each_stored<T>(o, step, token, [&](void* pool, int64_t at, const T* from, float steps) {
        write_cached(o.type, pool, at, from, o.head_dim, steps);
    });
}

template <class T>
void store_kv(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const StoreOperands*>(operands);
    threads.share(step.num_tokens, [&](int64_t token) { store_token<T>(o, step, token); });
}

// Copies of pages from each of several pools to a pool of the same layout.
struct CopyPagesOperands {
    const int64_t* pools;         // [pools, 5]: see PoolPair
    const int64_t* source_pages;  // [N]
    const int64_t* target_pages;  // [N]
    int64_t num_pools;
    int64_t num_pages;            // N
};

struct PoolPair {
    int64_t source, target;                // addresses of the first pages
    int64_t source_stride, target_stride;  // bytes from one page to the next
    int64_t page_bytes;
};

template <class T>
void copy_pages(const void* operands, const Step&, ThreadGroup& threads) {
    const auto& o = *static_cast<const CopyPagesOperands*>(operands);
    const auto* pools = reinterpret_cast<const PoolPair*>(o.pools);
    threads.share(o.num_pages, [&](int64_t i) {
        for (const PoolPair* pool = pools; pool < pools + o.num_pools; pool++) {
            const auto* source = reinterpret_cast<const char*>(pool->source + o.source_pages[i] * pool->source_stride);
            auto* target = reinterpret_cast<char*>(pool->target + o.target_pages[i] * pool->target_stride);
            std::memcpy(target, source, pool->page_bytes);
        }
    });
}

// Rotation and cache write in one pass over the tokens.
struct RotateStoreOperands {
    RotateOperands rotate;
    StoreOperands store;
};

template <class T>
inline void fetch_token(const RotateStoreOperands& o, const Step& step, int64_t token) {
    const int64_t head_dim = o.store.head_dim;
    fetch(static_cast<const T*>(o.rotate.q) + token * o.rotate.q_stride, o.rotate.num_heads * head_dim);
    each_stored<T>(o.store, step, token, [&](void* pool, int64_t at, const T* from, float) {
        fetch(from, head_dim);
        if (o.store.type == ALIKE)
            fetch_to_write(static_cast<T*>(pool) + at, head_dim);
        else
            fetch_to_write(static_cast<uint8_t*>(pool) + at, head_dim);
    });
}

template <class T>
void rotate_store(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const RotateStoreOperands*>(operands);
    threads.share(step.num_tokens, [&](int64_t token) {
        if (token + TOKENS_AHEAD < step.num_tokens) fetch_token<T>(o, step, token + TOKENS_AHEAD);
        rotate_token<T>(o.rotate, step, token);
        store_token<T>(o.store, step, token);
    });
}

// Vectors that replace the embeddings of some tokens, for example of images.
struct Media {
    const void* vectors;   // [T, E]
    const uint8_t* given;  // [T], whether a token has a vector; null: no token has one
};

// Copies the token's vector and returns true, if it has one.
template <class T>
inline bool take_medium(const Media& media, int64_t token, T* to, int64_t size) {
    if (!media.given || !media.given[token]) return false;
    std::memcpy(to, static_cast<const T*>(media.vectors) + token * size, size * sizeof(T));
    return true;
}

struct EmbedOperands {
    const void* weight;  // [V, E]
    void* out;           // [T, E]
    int64_t size;        // E
    float scale;         // factor of the vectors
    const void* position_weight;   // [N, E], or null
    const void* type_weight;       // [2, E], or [E] without `second_starts`, or null
    const int32_t* second_starts;  // [T], first position with the second type in the token's row, or 0; or null
    Media media;         // used by `embed` and `embed_packed`
};

template <class T>
inline void scale_line(T* x, int64_t size, float scale) {
    if (scale == 1) return;
    in_vectors(size, [&](int64_t k, int64_t count) { store(x + k, load(x + k, count) * scale, count); });
}

template <class T>
void embed(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const EmbedOperands*>(operands);
    threads.share(step.num_tokens, [&](int64_t token) {
        T* to = static_cast<T*>(o.out) + token * o.size;
        if (take_medium(o.media, token, to, o.size)) return;
        std::memcpy(to, static_cast<const T*>(o.weight) + step.token_ids[token] * o.size, o.size * sizeof(T));
        scale_line(to, o.size, o.scale);
    });
}

// Adds the vectors of a token's id, position and type, and rounds once.
template <class T>
void embed_with_positions(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const EmbedOperands*>(operands);
    const auto word_of = [&](int64_t token) { return static_cast<const T*>(o.weight) + step.token_ids[token] * o.size; };
    threads.share(step.num_tokens, [&](int64_t token) {
        if (token + TOKENS_AHEAD < step.num_tokens) fetch(word_of(token + TOKENS_AHEAD), o.size);
        const T* word = word_of(token);
        const T* place = o.position_weight ? static_cast<const T*>(o.position_weight) + step.positions[token] * o.size : nullptr;
        const bool is_second = o.second_starts && o.second_starts[token] && step.positions[token] >= o.second_starts[token];
        const T* type = o.type_weight ? static_cast<const T*>(o.type_weight) + is_second * o.size : nullptr;
        T* to = static_cast<T*>(o.out) + token * o.size;
        in_vectors(o.size, [&](int64_t k, int64_t count) {
            Floats x = load(word + k, count);
            if (type) x += load(type + k, count);
            if (place) x += load(place + k, count);
            store(to + k, x, count);
        });
    });
}

enum Activation : int64_t { SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, CLAMPED_SWIGLU, LOGISTIC };

constexpr float SWIGLU_LIMIT = 7.0f;   // limit of CLAMPED_SWIGLU
constexpr float SWIGLU_SLOPE = 1.702f;

// x / (1 + e^-z)
inline Floats through_sigmoid(Floats x, Floats z) { return x * reciprocal(1.0f + exponential(-z)); }

#if defined(__AVX512F__)

// The integral of the normal distribution from 0 to |x|. Each of 32 ranges of |x| has a polynomial, whose terms are
// looked up in registers. The absolute error is 4e-9, plus rounding. From the middle of the last range on, the value is
// 1/2.
struct NormalTable {
    static constexpr int RANGES = 32, TERMS = 5;
    // ranges per unit of |x|; middle of the last range
    static constexpr float PER_UNIT = 5.5f, END = (RANGES - 1) / PER_UNIT;
    alignas(64) float terms[TERMS][RANGES];

    // Taylor polynomials of degree 5 around the middle of each range. The term of degree 5 is replaced by lower terms
    // of a Chebyshev polynomial.
    NormalTable() {
        for (int i = 0; i < RANGES; i++) {
            const double h = 1 / double(PER_UNIT), x = i * h, density = h * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
            const double fifth = density * h * h * h * h * (x * x * x * x - 6 * x * x + 3) / 120;
            terms[0][i] = float(std::erf(x / std::sqrt(2.0)) / 2);
            terms[1][i] = float(density - fifth * 5 / 256);
            terms[2][i] = float(-density * h * x / 2);
            terms[3][i] = float(density * h * h * (x * x - 1) / 6 + fifth * 5 / 16);
            terms[4][i] = float(density * h * h * h * x * (3 - x * x) / 24);
        }
    }
};

inline const NormalTable NORMAL_TABLE;

// x times the integral of the normal distribution, with an absolute error of 9e-8 * x. It computes several vectors at
// once, because the computation of a single vector is a chain of dependent instructions.
template <bool, int N>
inline void gelu(Floats (&x)[N]) {
    constexpr float TO_INTEGER = 12582912.0f;  // adding 1.5 * 2^23 leaves the range in the lowest bits
    Floats at[N], p[N];
    __m512i range[N];
    const auto term = [&](int i, int which) {
        const float* from = NORMAL_TABLE.terms[which];
        return cast<Floats>(_mm512_permutex2var_ps(_mm512_load_ps(from), range[i], _mm512_load_ps(from + LANES)));
    };
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) {
        const Floats size = smaller(fill(NormalTable::END), larger(x[i], -x[i])) * NormalTable::PER_UNIT;
        const Floats shifted = size + TO_INTEGER;
        range[i] = cast<__m512i>(shifted);
        at[i] = size - (shifted - TO_INTEGER);
        p[i] = term(i, NormalTable::TERMS - 1);
    }
#pragma GCC unroll 16
    for (int which = NormalTable::TERMS - 2; which >= 0; which--)
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) p[i] = p[i] * at[i] + term(i, which);
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) x[i] = 0.5f * x[i] + larger(x[i], -x[i]) * p[i];
}

#else

// x times the integral of the normal distribution. The logarithm of the distribution's tail is nearly a polynomial. The
// error is 5e-8 * x, and smaller beyond |x| = 6. SHORT is for results that are rounded to bfloat16: the relative error
// is 2e-4 down to x = -4, and the absolute error below that is 1e-5. It computes several vectors at once, because the
// computation of a single vector is a chain of dependent instructions.
template <bool SHORT, int N>
inline void gelu(Floats (&x)[N]) {
    static constexpr float FULL[] = {-8.562446965e-07f, 1.406874253e-05f,  -5.608179345e-05f,
                                     -4.837822053e-04f, 7.579703815e-03f,  -5.292607844e-02f,
                                     -4.590187073e-01f, -1.151143670e+00f, -9.999974370e-01f};
    static constexpr float FEW[] = {-3.365744778e-04f, 5.982560106e-03f,  -4.875576124e-02f,
                                    -4.634254277e-01f, -1.149496198e+00f, -1.000097513e+00f};
    Floats size[N], tail[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) size[i] = larger(x[i], -x[i]);
    if constexpr (SHORT)
        polynomials(FEW, size, tail);
    else
        polynomials(FULL, size, tail);
    powers_of_two<SHORT>(tail);
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) x[i] = x[i] * where_less(x[i], Floats{}, tail[i], 1.0f - tail[i]);
}

#endif

// SHORT: less precision, for results that are rounded to bfloat16.
template <Activation KIND, bool SHORT = false>
inline Floats activate(Floats x) {
    switch (KIND) {
        case SILU:
            return through_sigmoid(x, x);
        case GELU_TANH:  // (1 + tanh(y)) / 2 is the sigmoid of 2 y
            return through_sigmoid(x, 2 * 0.7978845608028654f * (x + 0.044715f * x * x * x));
        case GELU: {
            Floats alone[] = {x};
            gelu<SHORT>(alone);
            return alone[0];
        }
        case RELU:
            return larger(Floats{}, x);  // a NaN stays NaN
        case RELU_SQUARED: {
            const Floats held = larger(Floats{}, x);
            return held * held;
        }
        case CLAMPED_SWIGLU: {
            const Floats held = smaller(fill(SWIGLU_LIMIT), x);
            return through_sigmoid(held, SWIGLU_SLOPE * held);
        }
        case LOGISTIC:
            return through_sigmoid(fill(1.0f), x);
    }
}

// Applies the activation to several vectors at once.
template <Activation KIND, bool SHORT, int N>
inline void activate_all(Floats (&x)[N]) {
    if constexpr (KIND == GELU) return gelu<SHORT>(x);
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) x[i] = activate<KIND, SHORT>(x[i]);
}

// Returns `gated` times the activated gate.
template <Activation KIND>
inline Floats through_gate(Floats gate, Floats gated) {
    if (KIND == CLAMPED_SWIGLU) gated = 1.0f + smaller(fill(SWIGLU_LIMIT), larger(fill(-SWIGLU_LIMIT), gated));
    return activate<KIND>(gate) * gated;
}

struct GateOperands {
    const void* x;      // [tokens, size], input of the activation; tokens x_stride elements apart
    const void* gated;  // [tokens, size], multiplied with the activated x; or null
    void* out;          // [tokens, size], contiguous
    int64_t tokens;     // 0: all tokens of the step
    int64_t x_stride, gated_stride;
    int64_t size;
    Activation kind;
};

template <class T, Activation KIND>
void gate_line(const T* x, const T* gated, T* out, int64_t size) {
    constexpr bool SHORT = sizeof(T) == sizeof(BFloat16);
    in_vectors(size, [&](int64_t k, int64_t count) {
        fetch(x + k + GATE_AHEAD, 1);
        if (gated) fetch(gated + k + GATE_AHEAD, 1);
        const Floats value = load(x + k, count);
        store(out + k, gated ? through_gate<KIND>(value, load(gated + k, count)) : activate<KIND, SHORT>(value), count);
    });
}

template <class T>
constexpr auto gate_line_of(Activation kind) {
    switch (kind) {
        case SILU: return gate_line<T, SILU>;
        case GELU: return gate_line<T, GELU>;
        case GELU_TANH: return gate_line<T, GELU_TANH>;
        case RELU: return gate_line<T, RELU>;
        case RELU_SQUARED: return gate_line<T, RELU_SQUARED>;
        case CLAMPED_SWIGLU: return gate_line<T, CLAMPED_SWIGLU>;
        case LOGISTIC: return gate_line<T, LOGISTIC>;
    }
    __builtin_unreachable();
}

template <class T>
void gate(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const GateOperands*>(operands);
    const int64_t tokens = o.tokens ? o.tokens : step.num_tokens;
    const int64_t parts = (o.size + 511) / 512;  // a single token is divided among threads too
    const auto line = gate_line_of<T>(o.kind);
    threads.share(tokens * parts, [&](int64_t task) {
        const int64_t token = task / parts, first = task % parts * 512, size = std::min<int64_t>(512, o.size - first);
        const T* x = static_cast<const T*>(o.x) + token * o.x_stride + first;
        const T* gated = o.gated ? static_cast<const T*>(o.gated) + token * o.gated_stride + first : nullptr;
        line(x, gated, static_cast<T*>(o.out) + token * o.size + first, size);
    });
}

}  // namespace penstock
