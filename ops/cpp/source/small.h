// What is done to each token by itself: norms, rotation, gates, cache writes.
// Contracts: ops/norm, ops/rope, ops/activation, ops/kv.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"
#include "step.h"

namespace penstock {

constexpr int64_t PORTION = 4;  // tokens taken at once

// Calls `work` for every one of `count` pieces of work, each on the thread that takes it.
template <class Work>
inline void share(Team& team, int64_t count, const Work& work) {
    const int64_t portion = std::max<int64_t>(1, std::min(PORTION, count / (2 * team.size)));
    for (int64_t first; (first = team.take(portion)) < count;)
        for (int64_t i = first; i < std::min(first + portion, count); i++) work(i);
}

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
    const int64_t whole = size / LANES * LANES;
    Floats squares{};
    for (int64_t k = 0; k < whole; k += LANES) {
        Floats value = load(x + k);
        if (residual) {
            store(residual + k, value + load(residual + k));
            value = load(residual + k);  // as rounded
        }
        squares += value * value;
    }
    float total = sum(squares);
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
    share(team, tokens, [&](int64_t token) {
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
    share(team, step.num_tokens, [&](int64_t token) {
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
    share(team, step.num_tokens, [&](int64_t token) {
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
    share(team, step.num_tokens, [&](int64_t token) {
        std::memcpy(static_cast<T*>(o.out) + token * o.size,
                    static_cast<const T*>(o.weight) + step.token_ids[token] * o.size, o.size * sizeof(T));
    });
}

enum Activation : int64_t { SILU, GELU, GELU_TANH, RELU };

inline Floats hyperbolic_tangent(Floats x) {
    const Floats power = exponential(x * 2.0f);
    return 1.0f - 2.0f / (power + 1.0f);
}

inline Floats activate(Floats x, Activation kind) {
    switch (kind) {
        case SILU:
            return x / (1.0f + exponential(-x));
        case GELU_TANH:
            return 0.5f * x * (1.0f + hyperbolic_tangent(0.7978845608028654f * (x + 0.044715f * x * x * x)));
        case GELU: {
            Floats result;
            for (int lane = 0; lane < LANES; lane++)
                result[lane] = 0.5f * x[lane] * (1.0f + std::erf(x[lane] * 0.7071067811865476f));
            return result;
        }
        case RELU:
            return x < 0.0f ? Floats{} : x;  // a NaN stays one
    }
    return x;
}

struct GateOperands {
    const void* x;   // [tokens, 2 * size]: gates, then what they gate; contiguous
    void* out;       // [tokens, size]
    int64_t tokens;  // 0: those of the step
    int64_t size;
    Activation kind;
};

template <class T>
void gate(const void* operands, const Step& step, Team& team) {
    const auto& o = *static_cast<const GateOperands*>(operands);
    const int64_t tokens = o.tokens ? o.tokens : step.num_tokens;
    const int64_t parts = (o.size + 511) / 512;  // a token alone is shared too
    share(team, tokens * parts, [&](int64_t task) {
        const int64_t token = task / parts, first = task % parts * 512, end = std::min(first + 512, o.size);
        const T* x = static_cast<const T*>(o.x) + token * 2 * o.size;
        T* out = static_cast<T*>(o.out) + token * o.size;
        int64_t k = first;
        for (; k + LANES <= end; k += LANES) store(out + k, activate(load(x + k), o.kind) * load(x + o.size + k));
        for (; k < end; k++) narrow(out + k, activate(fill(widen(x[k])), o.kind)[0] * widen(x[o.size + k]));
    });
}

}  // namespace penstock
