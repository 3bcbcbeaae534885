// What is done to each token by itself: norms, rotation, gates, cache writes.
// Contracts: ops/norm, ops/rope, ops/activation, ops/kv.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"
#include "step.h"

namespace penstock {

struct NormOperands {
    const void* x;         // lines of `size`, `lines` to a token, tokens `stride` elements apart
    void* residual;        // the sum x + residual is left here; contiguous; null: there is none
    const void* weight;    // [size]
    void* out;             // contiguous
    int64_t tokens;        // 0: those of the step
    int64_t lines;
    int64_t stride;
    int64_t size;
    float eps;
    float offset;          // added to the weight
};

// Adds x to the residual, and gives the sum as rounded.
template <class T>
inline float add_to(T* residual, T x) {
    narrow(residual, widen(x) + widen(*residual));
    return widen(*residual);
}

template <class T>
void norm_line(const T* x, T* residual, const T* weight, T* out, int64_t size, float eps, float offset) {
    const auto value_at = [=](int64_t k) {
        const Floats value = load(x + k);
        return residual ? store_rounded(residual + k, value + load(residual + k)) : value;
    };
    constexpr int SUMS = 4;  // one would wait for itself; which element goes to which depends on its place alone
    const int64_t whole = size / LANES * LANES;
    Floats squares[SUMS]{};
    int64_t k = 0;
    for (; k + SUMS * LANES <= whole; k += SUMS * LANES)
#pragma GCC unroll 4
        for (int i = 0; i < SUMS; i++) {
            const Floats value = value_at(k + i * LANES);
            squares[i] += value * value;
        }
    for (; k < whole; k += LANES) {
        const Floats value = value_at(k);
        squares[0] += value * value;
    }
    float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (int64_t k = whole; k < size; k++) {
        const float value = residual ? add_to(residual + k, x[k]) : widen(x[k]);
        total += value * value;
    }
    const float factor = 1.0f / std::sqrt(total / float(size) + eps);
    const T* from = residual ? residual : x;
    for (int64_t k = 0; k < whole; k += LANES) store(out + k, load(from + k) * factor * (load(weight + k) + offset));
    for (int64_t k = whole; k < size; k++) narrow(out + k, widen(from[k]) * factor * (widen(weight[k]) + offset));
}

template <class T>
void norm(const void* operands, const Step& step, Team& team) {
    const auto& o = *static_cast<const NormOperands*>(operands);
    const int64_t tokens = o.tokens ? o.tokens : step.num_tokens;
    team.share(tokens, [&](int64_t token) {
        for (int64_t line = 0; line < o.lines; line++) {
            const int64_t place = (token * o.lines + line) * o.size;
            const T* x = static_cast<const T*>(o.x) + token * o.stride + line * o.size;
            T* residual = o.residual ? static_cast<T*>(o.residual) + place : nullptr;
            norm_line<T>(x, residual, static_cast<const T*>(o.weight), static_cast<T*>(o.out) + place, o.size, o.eps,
                         o.offset);
        }
    });
}

struct RotateOperands {
    void* q;             // [T, H, D], in place, tokens q_stride elements apart, heads D apart
    void* k;             // [T, K, D], likewise
    const float* table;  // [N, R]: cosines, then sines
    int64_t q_stride, k_stride;
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t size;        // R
    int64_t interleaved;
};

template <class T>
inline void rotate_pair(T* first, T* second, float cosine, float sine) {
    const float a = widen(*first), b = widen(*second);
    narrow(first, a * cosine - b * sine);
    narrow(second, b * cosine + a * sine);
}

template <class T>
inline void rotate_head(T* head, const float* cosines, const float* sines, int64_t half, bool interleaved) {
    if (interleaved) {
        for (int64_t i = 0; i < half; i++) rotate_pair(head + 2 * i, head + 2 * i + 1, cosines[i], sines[i]);
        return;
    }
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const Floats a = load(head + i), b = load(head + half + i), cosine = load(cosines + i), sine = load(sines + i);
        store(head + i, a * cosine - b * sine);
        store(head + half + i, b * cosine + a * sine);
    }
    for (; i < half; i++) rotate_pair(head + i, head + half + i, cosines[i], sines[i]);
}

template <class T>
void rotate(const void* operands, const Step& step, Team& team) {
    const auto& o = *static_cast<const RotateOperands*>(operands);
    const int64_t half = o.size / 2;
    team.share(step.num_tokens, [&](int64_t token) {
        const float* cosines = o.table + step.positions[token] * o.size;
        T* q = static_cast<T*>(o.q) + token * o.q_stride;
        T* k = static_cast<T*>(o.k) + token * o.k_stride;
        for (int64_t h = 0; h < o.num_heads; h++)
            rotate_head(q + h * o.head_dim, cosines, cosines + half, half, o.interleaved);
        for (int64_t h = 0; h < o.num_kv_heads; h++)
            rotate_head(k + h * o.head_dim, cosines, cosines + half, half, o.interleaved);
    });
}

struct StoreOperands {
    const void* k;    // [T, K, D], tokens `k_stride` elements apart
    const void* v;
    void* k_pool;     // [P, K, page, D]
    void* v_pool;
    int64_t k_stride, v_stride;
    int64_t num_kv_heads, head_dim;
};

template <class T>
void store_kv(const void* operands, const Step& step, Team& team) {
    const auto& o = *static_cast<const StoreOperands*>(operands);
    team.share(step.num_tokens, [&](int64_t token) {
        const int64_t page = step.slots[token] / step.page_size, offset = step.slots[token] % step.page_size;
        const T* k = static_cast<const T*>(o.k) + token * o.k_stride;
        const T* v = static_cast<const T*>(o.v) + token * o.v_stride;
        for (int64_t h = 0; h < o.num_kv_heads; h++) {
            const int64_t place = ((page * o.num_kv_heads + h) * step.page_size + offset) * o.head_dim;
            std::memcpy(static_cast<T*>(o.k_pool) + place, k + h * o.head_dim, o.head_dim * sizeof(T));
            std::memcpy(static_cast<T*>(o.v_pool) + place, v + h * o.head_dim, o.head_dim * sizeof(T));
        }
    });
}

struct EmbedOperands {
    const void* weight;  // [V, E]
    void* out;           // [T, E]
    int64_t size;        // E
};

template <class T>
void embed(const void* operands, const Step& step, Team& team) {
    const auto& o = *static_cast<const EmbedOperands*>(operands);
    team.share(step.num_tokens, [&](int64_t token) {
        std::memcpy(static_cast<T*>(o.out) + token * o.size,
                    static_cast<const T*>(o.weight) + step.token_ids[token] * o.size, o.size * sizeof(T));
    });
}

enum Activation : int64_t { SILU, GELU, GELU_TANH, RELU };

// x / (1 + e^-z)
inline Floats through_sigmoid(Floats x, Floats z) { return x * reciprocal(1.0f + exponential(-z)); }

template <Activation KIND>
inline Floats activate(Floats x) {
    switch (KIND) {
        case SILU:
            return through_sigmoid(x, x);
        case GELU_TANH:  // half of 1 + tanh(y) is the sigmoid of 2 y
            return through_sigmoid(x, 2 * 0.7978845608028654f * (x + 0.044715f * x * x * x));
        case GELU: {
            Floats result;
            for (int lane = 0; lane < LANES; lane++)
                result[lane] = 0.5f * x[lane] * (1.0f + std::erf(x[lane] * 0.7071067811865476f));
            return result;
        }
        case RELU:
            return larger(Floats{}, x);  // a NaN stays one
    }
}

struct GateOperands {
    const void* x;   // [tokens, 2 * size]: gates, then what they gate; contiguous
    void* out;       // [tokens, size]
    int64_t tokens;  // 0: those of the step
    int64_t size;
    Activation kind;
};

template <class T, Activation KIND>
void gate_line(const T* x, const T* gated, T* out, int64_t size) {
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) store(out + k, activate<KIND>(load(x + k)) * load(gated + k));
    for (; k < size; k++) narrow(out + k, activate<KIND>(fill(widen(x[k])))[0] * widen(gated[k]));
}

template <class T>
constexpr auto gate_line_of(Activation kind) {
    switch (kind) {
        case SILU: return gate_line<T, SILU>;
        case GELU: return gate_line<T, GELU>;
        case GELU_TANH: return gate_line<T, GELU_TANH>;
        case RELU: return gate_line<T, RELU>;
    }
    __builtin_unreachable();
}

template <class T>
void gate(const void* operands, const Step& step, Team& team) {
    const auto& o = *static_cast<const GateOperands*>(operands);
    const int64_t tokens = o.tokens ? o.tokens : step.num_tokens;
    const int64_t parts = (o.size + 511) / 512;  // a token alone is shared too
    const auto line = gate_line_of<T>(o.kind);
    team.share(tokens * parts, [&](int64_t task) {
        const int64_t token = task / parts, first = task % parts * 512, size = std::min<int64_t>(512, o.size - first);
        const T* x = static_cast<const T*>(o.x) + token * 2 * o.size + first;
        line(x, x + o.size, static_cast<T*>(o.out) + token * o.size + first, size);
    });
}

}  // namespace penstock
