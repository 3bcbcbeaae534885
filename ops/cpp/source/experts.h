// Mixtures of experts (contract: ops/moe/__init__.py).
//
// Pairs of a token and one of its experts are sorted by expert, and their rows are copied, so that each expert multiplies
// adjacent rows. The weights of all experts are consecutive panels; each expert is padded to whole panels. A panel of
// `gate_up` has 16 outputs of the gate and the corresponding 16 outputs of `up`, so that inner activations are computed
// from its sums immediately.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "product.h"
#include "product4.h"
#include "product8.h"
#include "small.h"

namespace penstock {

constexpr int64_t MAX_EXPERTS = 1024;

enum RouteScoring : int64_t { SOFTMAX, SIGMOID };

struct RouteOperands {
    const void* logits;  // [T, X]
    int64_t stride;      // elements between tokens
    const float* bias;   // [X], added to scores for the selection, or null
    float* weights;      // [T, k]
    int32_t* experts;    // [T, k]
    int64_t tokens;      // 0: all tokens of the step
    int64_t num_experts, top_k;
    RouteScoring scoring;
    int64_t renormalise;
    int64_t num_groups, top_groups;  // groups of consecutive experts; experts are selected from the best groups
    int64_t group_scores;            // number of best scores whose sum is a group's score
    float scale;                     // factor of all weights
};

// Returns the index of the largest value that is not taken yet, and marks it as taken. Among equal values, it takes the
// first. Returns -1 if there is no value.
inline int64_t take_largest(float* values, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (values[i] > -std::numeric_limits<float>::infinity() && (best < 0 || values[i] > values[best])) best = i;
    if (best < 0) return -1;
    values[best] = -std::numeric_limits<float>::infinity();
    return best;
}

// Excludes experts outside the best groups.
inline void keep_best_groups(const RouteOperands& o, float* choice) {
    const int64_t size = o.num_experts / o.num_groups;
    float totals[MAX_EXPERTS], held[MAX_EXPERTS];
    for (int64_t group = 0; group < o.num_groups; group++) {
        std::copy_n(choice + group * size, size, held);
        totals[group] = 0;
        for (int64_t i = 0; i < o.group_scores; i++) {
            const float* most = std::max_element(held, held + size);
            totals[group] += *most;
            held[most - held] = -std::numeric_limits<float>::infinity();
        }
    }
    bool kept[MAX_EXPERTS] = {};
    for (int64_t i = 0; i < o.top_groups; i++) {
        const int64_t group = take_largest(totals, o.num_groups);
        if (group >= 0) kept[group] = true;
    }
    for (int64_t expert = 0; expert < o.num_experts; expert++)
        if (!kept[expert / size]) choice[expert] = -std::numeric_limits<float>::infinity();
}

template <class T>
void route_token(const RouteOperands& o, int64_t token) {
    float scores[MAX_EXPERTS + LANES], choice[MAX_EXPERTS + LANES];
    const T* logits = static_cast<const T*>(o.logits) + token * o.stride;
    for (int64_t i = 0; i < o.num_experts; i++) choice[i] = widen(logits[i]);
    const float most = *std::max_element(choice, choice + o.num_experts);
    Floats totals{};
    in_vectors(o.num_experts, [&](int64_t k, int64_t count) {
        const Floats x = load(choice + k, count);
        Floats score = o.scoring == SOFTMAX ? exponential(x - most) : through_sigmoid(fill(1.0f), x);
        for (int64_t lane = count; lane < LANES; lane++) score[lane] = 0;
        store(scores + k, score, count);
        totals += score;
    });
    const float total = o.scoring == SOFTMAX ? sum(totals) : 1.0f;
    for (int64_t i = 0; i < o.num_experts; i++) scores[i] /= total;
    if (o.bias || o.num_groups > 1)
        for (int64_t i = 0; i < o.num_experts; i++) choice[i] = scores[i] + (o.bias ? o.bias[i] : 0.0f);
    if (o.num_groups > 1) keep_best_groups(o, choice);
    float* weights = o.weights + token * o.top_k;
    int32_t* experts = o.experts + token * o.top_k;
    float chosen = 0;
    for (int64_t i = 0; i < o.top_k; i++) {
        const int64_t expert = take_largest(choice, o.num_experts);
        experts[i] = int32_t(expert < 0 ? i : expert);  // if a logit is NaN, any expert is valid
        weights[i] = scores[experts[i]];
        chosen += weights[i];
    }
    const float factor = o.renormalise ? o.scale / (chosen + 1e-20f) : o.scale;
    for (int64_t i = 0; i < o.top_k; i++) weights[i] *= factor;
}

template <class T>
void route(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const RouteOperands*>(operands);
    threads.share(o.tokens ? o.tokens : step.num_tokens, [&](int64_t token) { route_token<T>(o, token); });
}

// Positions of pairs sorted by expert.
struct PairTable {
    int32_t* positions;  // [T * k], position of each pair; -1: its expert is on another rank
    int32_t* starts;  // [X + 1], position of each expert's first pair
    int32_t* blocks;  // [X + 1], index of each expert's first block of BLOCK_ROWS pairs
};

struct DispatchOperands {
    const void* x;           // [T, E]
    int64_t x_stride;
    const int32_t* experts;  // [T, k]; -1: the expert is on another rank
    const float* weights;    // [T, k], factors of the rows, or null
    PairTable table;
    void* rows;              // [T * k, E], sorted by expert
    int64_t tokens;          // 0: all tokens of the step
    int64_t num_experts, top_k, size;
};

inline void sort_pairs(const DispatchOperands& o, int64_t pairs) {
    const PairTable& t = o.table;
    std::fill_n(t.starts, o.num_experts + 1, 0);
    for (int64_t pair = 0; pair < pairs; pair++)
        if (o.experts[pair] >= 0) t.starts[o.experts[pair] + 1]++;
    t.blocks[0] = 0;
    int32_t next[MAX_EXPERTS];
    for (int64_t expert = 0; expert < o.num_experts; expert++) {
        const int32_t count = t.starts[expert + 1];
        next[expert] = t.starts[expert];
        t.starts[expert + 1] += t.starts[expert];
        t.blocks[expert + 1] = t.blocks[expert] + int32_t((count + BLOCK_ROWS - 1) / BLOCK_ROWS);
    }
    for (int64_t pair = 0; pair < pairs; pair++)
        t.positions[pair] = o.experts[pair] < 0 ? -1 : next[o.experts[pair]]++;
}

template <class T>
void dispatch(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const DispatchOperands*>(operands);
    const int64_t pairs = (o.tokens ? o.tokens : step.num_tokens) * o.top_k;
    threads.share(1, [&](int64_t) { sort_pairs(o, pairs); });
    threads.barrier();
    threads.share(pairs, [&](int64_t pair) {
        if (o.table.positions[pair] < 0) return;
        T* row = static_cast<T*>(o.rows) + o.table.positions[pair] * o.size;
        std::memcpy(row, static_cast<const T*>(o.x) + pair / o.top_k * o.x_stride, o.size * sizeof(T));
        if (o.weights) scale_line(row, o.size, o.weights[pair]);
    });
}

struct ExpertsOperands {
    Product8Operands product;  // rows sorted by expert, and all panels; its `rows` and `bias` are ignored
    Product4Operands product4;  // replaces `product` for 4-bit weights
    PairTable table;
    const void* bias;          // [X * panels * PANEL] with a gate, else [X, O]; or null
    void* out;                 // [T * k, O], sorted by expert
    int64_t num_experts;
    int64_t panels;            // per expert
    int64_t out_size;          // O, size of a row of `out`
    Activation kind;           // activation of the gate, if any
};

// Calls work(first row, end, panel) for each panel of each expert and each block of its rows, as tasks of the threads.
template <class Work>
inline void share_experts(const ExpertsOperands& o, ThreadGroup& threads, const Work& work) {
    const PairTable& t = o.table;
    threads.share(t.blocks[o.num_experts] * o.panels, [&](int64_t task) {
        const int64_t block = task / o.panels;
        const int64_t expert = std::upper_bound(t.blocks, t.blocks + o.num_experts, int32_t(block)) - t.blocks - 1;
        const int64_t first = t.starts[expert] + (block - t.blocks[expert]) * BLOCK_ROWS;
        const int64_t end = std::min<int64_t>(first + BLOCK_ROWS, t.starts[expert + 1]);
        work(first, end, expert * o.panels + task % o.panels);
    });
}

// BITS: bits per weight; 0: weights of type T.
template <class T, int BITS, class Put>
inline void multiply_experts(const ExpertsOperands& o, ThreadGroup& threads, const Put& put) {
    const auto share = [&](const auto& work) { share_experts(o, threads, work); };
    if constexpr (BITS == 4)
        multiply4_over<T>(o.product4, threads, o.table.starts[o.num_experts], share, put);
    else if constexpr (BITS == 8)
        multiply8_over<T>(o.product, threads, o.table.starts[o.num_experts], share, put);
    else
        multiply_over<T>(o.product.plain, share, put);
}

using Gate = Floats (*)(Floats gate, Floats gated);

inline Gate gate_of(Activation kind) {
    switch (kind) {
        case SILU: return through_gate<SILU>;
        case GELU: return through_gate<GELU>;
        case GELU_TANH: return through_gate<GELU_TANH>;
        case RELU: return through_gate<RELU>;
        case RELU_SQUARED: return through_gate<RELU_SQUARED>;
        case CLAMPED_SWIGLU: return through_gate<CLAMPED_SWIGLU>;
        case LOGISTIC: return through_gate<LOGISTIC>;
    }
    __builtin_unreachable();
}

inline Floats rounded_as(const float*, Floats x) { return x; }
inline Floats rounded_as(const BFloat16*, Floats x) { return widen(round_to_bfloat16(x)); }

// Computes the inner activations from the rows. Both are sorted by expert.
template <class T, int BITS>
void experts_up(const void* operands, const Step&, ThreadGroup& threads) {
    const auto& o = *static_cast<const ExpertsOperands*>(operands);
    const Gate gate = gate_of(o.kind);
    const T* bias = static_cast<const T*>(o.bias);
    T* out = static_cast<T*>(o.out);
    multiply_experts<T, BITS>(o, threads, [&](int64_t row, int64_t panel, const Floats (&sums)[2]) {
        Floats gates = sums[0], gated = sums[1];
        if (bias) {
            gates += load(bias + panel * PANEL);
            gated += load(bias + panel * PANEL + LANES);
        }
        const Floats inner = gate(rounded_as(out, gates), rounded_as(out, gated));
        store(out + row * o.out_size + panel % o.panels * LANES, inner);
    });
}

// Computes the results from the inner activations. Both are sorted by expert.
template <class T, int BITS>
void experts_down(const void* operands, const Step&, ThreadGroup& threads) {
    const auto& o = *static_cast<const ExpertsOperands*>(operands);
    T* out = static_cast<T*>(o.out);
    multiply_experts<T, BITS>(o, threads, [&](int64_t row, int64_t panel, const Floats (&sums)[2]) {
        const T* bias = o.bias ? static_cast<const T*>(o.bias) + panel / o.panels * o.out_size : nullptr;
        store_sums<T, T>(sums, bias, out + row * o.out_size, panel % o.panels * PANEL, o.out_size);
    });
}

struct CombineOperands {
    const void* results;    // [T * k, E], sorted by expert
    const int32_t* positions;  // [T * k]
    const float* weights;   // [T, k], or null for 1
    void* out;              // [T, E]
    int64_t tokens;         // 0: all tokens of the step
    int64_t top_k, size;
};

template <class T>
void combine(const void* operands, const Step& step, ThreadGroup& threads) {
    constexpr int64_t PART = 512;
    const auto& o = *static_cast<const CombineOperands*>(operands);
    const int64_t tokens = o.tokens ? o.tokens : step.num_tokens, parts = (o.size + PART - 1) / PART;
    threads.share(tokens * parts, [&](int64_t task) {
        const int64_t token = task / parts, first = task % parts * PART;
        in_vectors(std::min(PART, o.size - first), [&](int64_t k, int64_t count) {
            Floats total{};
            for (int64_t pair = token * o.top_k; pair < (token + 1) * o.top_k; pair++) {
                if (o.positions[pair] < 0) continue;
                const T* result = static_cast<const T*>(o.results) + o.positions[pair] * o.size + first + k;
                total += load(result, count) * (o.weights ? o.weights[pair] : 1.0f);
            }
            store(static_cast<T*>(o.out) + token * o.size + first + k, total, count);
        });
    });
}

}  // namespace penstock
