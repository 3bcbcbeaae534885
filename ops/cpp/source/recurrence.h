// Recurrent layers (contract: ops/recurrence/__init__.py).
//
// Tokens are computed one by one, so results do not depend on chunks or on other rows, bit for bit. A task computes some
// channels, or some columns of one head's state, for all spans of the step in order. No other task reads or writes the
// same channels or columns.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"
#include "small.h"
#include "step.h"

namespace penstock {

// Tokens start .. start + count - 1 of the batch, the state slot that they read, and the slot that they write.
struct Span {
    int32_t read, write, start, count;
};

// Calls work(span) for the spans of a step, which cover all its tokens.
template <class Work>
inline void each_span(const Span* spans, int64_t tokens, const Work& work) {
    for (int64_t done = 0; done < tokens; done += (spans++)->count) work(*spans);
}

struct ConvolveOperands {
    const void* x;       // [T, C], tokens x_stride elements apart
    const void* weight;  // [K, C]
    const void* bias;    // [C], or null
    const void* before;  // [T, C], factor of x; or null
    const void* after;   // [T, C], factor of the convolution; null: apply silu instead
    float* pool;         // [N, K - 1, C]
    void* out;           // [T, C], contiguous
    const Span* spans;
    int64_t tokens;      // 0: all tokens of the step
    int64_t x_stride, before_stride, after_stride, channels, kernel;
};

// Computes some channels of one span.
template <class T>
void convolve_span(const ConvolveOperands& o, const Span& span, int64_t first, int64_t size) {
    const int64_t kept = o.kernel - 1, channels = o.channels;
    const T* const x = static_cast<const T*>(o.x) + span.start * o.x_stride + first;
    const T *const weight = static_cast<const T*>(o.weight) + first, *const bias = static_cast<const T*>(o.bias);
    const auto gate = [&](const void* of, int64_t stride) {  // returns the gate from the span's first token on, or null
        return of ? static_cast<const T*>(of) + span.start * stride + first : nullptr;
    };
    const T *const before = gate(o.before, o.before_stride), *const after = gate(o.after, o.after_stride);
    const float* const read = o.pool + span.read * kept * channels + first;
    float* const written = o.pool + span.write * kept * channels + first;
    // input of token i of the span; a negative i reads the stored state
    const auto input = [&](int64_t i, int64_t k, int64_t count) {
        if (i < 0) return load(read + (kept + i) * channels + k, count);
        const Floats value = load(x + i * o.x_stride + k, count);
        return before ? load(before + i * o.before_stride + k, count) * value : value;
    };
    T* out = static_cast<T*>(o.out) + span.start * channels + first;
    for (int64_t i = 0; i < span.count; i++, out += channels)
        in_vectors(size, [&](int64_t k, int64_t count) {
            Floats sum = bias ? load(bias + first + k, count) : Floats{};
            for (int64_t tap = 0; tap <= kept; tap++)
                sum += input(i + tap - kept, k, count) * load(weight + tap * channels + k, count);
            const Floats passed = after ? load(after + i * o.after_stride + k, count) * sum : through_sigmoid(sum, sum);
            store(out + k, passed, count);
        });
    for (int64_t row = 0; row < kept; row++)  // ascending: source and target may overlap
        in_vectors(size, [&](int64_t k, int64_t count) {
            store(written + row * channels + k, input(span.count + row - kept, k, count), count);
        });
}

template <class T>
void convolve(const void* operands, const Step& step, ThreadGroup& threads) {
    constexpr int64_t PART = 128;
    const auto& o = *static_cast<const ConvolveOperands*>(operands);
    const int64_t tokens = o.tokens ? o.tokens : step.num_tokens;
    threads.share((o.channels + PART - 1) / PART, [&](int64_t part) {
        const int64_t first = part * PART, size = std::min(PART, o.channels - first);
        each_span(o.spans, tokens, [&](const Span& span) { convolve_span<T>(o, span, first, size); });
    });
}

struct RecurOperands {
    const void* q;       // [T, G, D], tokens q_stride elements apart, heads D apart; c of a scan
    const void* k;       // likewise; b of a scan
    const void* v;       // [T, H, E], likewise; x of a scan
    const void* a;       // [T, H], determines the state's decay; dt of a scan
    const void* b;       // [T, H], determines the strength of updates; null: the operation is a scan
    const float* rate;   // [H]
    const float* shift;  // [H]
    const float* skip;   // [H], of a scan
    void* pool;          // [N, H, D, E]
    void* out;           // [T, H, E], contiguous
    const Span* spans;
    int64_t tokens;      // 0: all tokens of the step
    int64_t q_stride, k_stride, v_stride, a_stride, b_stride;
    int64_t groups, heads, key_dim, value_dim;
    int64_t wide;        // whether the pool is float32; else it is bfloat16
    float low, high;     // bounds of a scan's dt
};

constexpr int64_t MAX_KEY_DIM = 256;
constexpr int64_t STATE_FLOATS = 8192;  // size of a task's state, which stays in the L1 cache
constexpr int64_t MAX_VECTORS = 4;      // vectors of columns per task

// Returns the number of vectors of columns per task.
inline int64_t vectors_of(const RecurOperands& o) {
    const int64_t fitting = std::clamp<int64_t>(STATE_FLOATS / (o.key_dim * LANES), 1, MAX_VECTORS);
    return std::min(fitting, (o.value_dim + LANES - 1) / LANES);
}

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// Updates some columns of one head's state.
template <class T, int VECTORS>
class Columns {
public:
    Columns(const RecurOperands& o, int64_t head, int64_t first) : o_(o), head_(head), first_(first) {
        for (int w = 0; w < VECTORS; w++) count_[w] = std::clamp<int64_t>(o.value_dim - first - w * LANES, 0, LANES);
    }

    template <class P>
    void go(const Span& span) {
        const int64_t size = o_.key_dim * o_.value_dim, offset = head_ * size + first_, row = o_.value_dim;
        const P* from = static_cast<const P*>(o_.pool) + span.read * o_.heads * size + offset;
        P* to = static_cast<P*>(o_.pool) + span.write * o_.heads * size + offset;
        const auto load_state = [&](int64_t d, int w) { return load(from + d * row + w * LANES, count_[w]); };
        const auto store_state = [&](int64_t d, int w, Floats x) { store(to + d * row + w * LANES, x, count_[w]); };
        // a scan of one token reads and writes the pool in a single pass
        if (span.count == 1 && !o_.b) return scan(span.start, load_state, store_state);
        each([&](int64_t d, int w) { state_[d][w] = load_state(d, w); });
        for (int64_t token = span.start; token < span.start + span.count; token++)
            o_.b ? update(token) : scan(token, held(), hold());
        each([&](int64_t d, int w) { store_state(d, w, state_[d][w]); });
    }

private:
    const RecurOperands& o_;
    const int64_t head_, first_;
    int64_t count_[VECTORS];  // columns in each vector
    Floats state_[MAX_KEY_DIM][VECTORS];
    alignas(64) float key_[MAX_KEY_DIM], query_[MAX_KEY_DIM];

    auto held() const {
        return [this](int64_t d, int w) { return state_[d][w]; };
    }

    auto hold() {
        return [this](int64_t d, int w, Floats x) { state_[d][w] = x; };
    }

    template <class Work>
    void each(const Work& work) const {
        const int64_t key_dim = o_.key_dim;
        for (int64_t d = 0; d < key_dim; d++)
#pragma GCC unroll 4
            for (int w = 0; w < VECTORS; w++) work(d, w);
    }

    float number(const void* of, int64_t stride, int64_t token) const {
        return widen(static_cast<const T*>(of)[token * stride + head_]);
    }

    Floats value(int64_t token, int w) const {
        return load(static_cast<const T*>(o_.v) + token * o_.v_stride + head_ * o_.value_dim + first_ + w * LANES, count_[w]);
    }

    // Reads a key or query of the head's group. If `unit` is not 0, scales the vector to this length.
    void read(const void* of, int64_t stride, int64_t token, float unit, float* to) const {
        const T* from = static_cast<const T*>(of) + token * stride + head_ / (o_.heads / o_.groups) * o_.key_dim;
        Floats squares{};
        in_vectors(o_.key_dim, [&](int64_t k, int64_t count) {
            const Floats x = load(from + k, count);
            squares += x * x;
            store(to + k, x, count);
        });
        if (unit == 0) return;
        const float factor = unit / std::sqrt(sum(squares) + 1e-6f);
        in_vectors(o_.key_dim, [&](int64_t k, int64_t count) { store(to + k, load(to + k, count) * factor, count); });
    }

    // Computes a token of the delta rule.
    void update(int64_t token) {
        read(o_.q, o_.q_stride, token, 1 / std::sqrt(float(o_.key_dim)), query_);
        read(o_.k, o_.k_stride, token, 1, key_);
        const float time = softplus(number(o_.a, o_.a_stride, token) + o_.shift[head_]);
        const float decay = std::exp(-std::exp(o_.rate[head_]) * time);
        const float beta = 1 / (1 + std::exp(-number(o_.b, o_.b_stride, token)));
        Floats known[VECTORS] = {}, written[VECTORS];
        each([&](int64_t d, int w) { known[w] += state_[d][w] * key_[d]; });
        for (int w = 0; w < VECTORS; w++) written[w] = (value(token, w) - known[w] * decay) * beta;
        put(token, write(decay, written, held(), hold()), Floats{});
    }

    // Computes a token of a scan.
    template <class LoadState, class StoreState>
    void scan(int64_t token, const LoadState& load_state, const StoreState& store_state) {
        read(o_.q, o_.q_stride, token, 0, query_);
        read(o_.k, o_.k_stride, token, 0, key_);
        const float step = softplus(number(o_.a, o_.a_stride, token) + o_.shift[head_]);
        const float time = std::min(std::max(step, o_.low), o_.high);
        Floats written[VECTORS];
        for (int w = 0; w < VECTORS; w++) written[w] = value(token, w) * time;
        const float decay = std::exp(-std::exp(o_.rate[head_]) * time);
        put(token, write(decay, written, load_state, store_state), fill(o_.skip[head_]));
    }

    struct Read {
        Floats of[VECTORS];
    };

    // Decays the state, adds the outer product of key and `written`, and returns the product of query and state.
    template <class LoadState, class StoreState>
    Read write(float decay, const Floats (&written)[VECTORS], const LoadState& load_state,
               const StoreState& store_state) {
        Read read{};
        each([&](int64_t d, int w) {
            const Floats state = load_state(d, w) * decay + written[w] * key_[d];
            store_state(d, w, state);
            read.of[w] += state * query_[d];
        });
        return read;
    }

    void put(int64_t token, const Read& read, Floats skip) {
        T* to = static_cast<T*>(o_.out) + (token * o_.heads + head_) * o_.value_dim + first_;
        for (int w = 0; w < VECTORS; w++) store(to + w * LANES, read.of[w] + value(token, w) * skip, count_[w]);
    }
};

template <class T, int VECTORS = MAX_VECTORS>
void recur_with(const RecurOperands& o, int64_t tokens, ThreadGroup& threads) {
    if constexpr (VECTORS > 0) {
        if (vectors_of(o) != VECTORS) return recur_with<T, VECTORS - 1>(o, tokens, threads);
        const int64_t parts = (o.value_dim + VECTORS * LANES - 1) / (VECTORS * LANES);
        threads.share(o.heads * parts, [&](int64_t task) {
            Columns<T, VECTORS> columns(o, task / parts, task % parts * VECTORS * LANES);
            each_span(o.spans, tokens, [&](const Span& span) {
                o.wide ? columns.template go<float>(span) : columns.template go<BFloat16>(span);
            });
        });
    }
}

template <class T>
void recur(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const RecurOperands*>(operands);
    recur_with<T>(o, o.tokens ? o.tokens : step.num_tokens, threads);
}

}  // namespace penstock
