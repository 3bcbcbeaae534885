// The first and the last kernels of a step that is captured as a whole. The first kernel computes positions and slot
// mapping from the batch's arrays. The last kernels compute the most likely tokens from hidden states. Contracts:
// runtime/worker/step_inputs.py, ops/sampling/__init__.py.
#pragma once

#include <cmath>
#include <limits>

#include "product.h"
#include "product4.h"
#include "product8.h"
#include "small.h"

namespace penstock {

struct BeginOperands {
    int32_t* query_starts;  // [B + 1]
    int64_t* token_ids;     // [T]
    int64_t* positions;     // [T]
    int64_t* slot_mapping;  // [T]
    const int32_t* page_table;  // as in AttendOperands
    int64_t* position_axes;     // [3, max_tokens]; null: no layer reads axes
    const int32_t* row_values;  // [num_values, max_rows], values per row from the batch
    int32_t* token_values;      // [num_values, max_tokens], the values of each token's row
    int64_t num_values, max_rows, max_tokens;
};

inline void begin_axes(const BeginOperands& o, const Step& step, int64_t row) {
    const int64_t first = o.query_starts[row];
    for (int64_t axis = 0; axis < NUM_AXES; axis++) {
        int64_t* to = o.position_axes + axis * o.max_tokens + first;
        const int32_t* offsets = step.position_offsets ? step.position_offsets + axis * step.num_tokens + first : nullptr;
        for (int64_t i = 0; i < step.counts[row]; i++) to[i] = step.starts[row] + i + (offsets ? offsets[i] : 0);
    }
}

inline void begin(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const BeginOperands*>(operands);
    threads.share(1, [&](int64_t) {
        o.query_starts[0] = 0;
        for (int64_t row = 0; row < step.num_rows; row++)
            o.query_starts[row + 1] = o.query_starts[row] + step.counts[row];
    });
    threads.barrier();
    threads.share(step.num_rows, [&](int64_t row) {
        const int32_t* pages = (o.page_table ? o.page_table : step.page_table) + row * step.table_width;
        for (int64_t i = 0, token = o.query_starts[row]; i < step.counts[row]; i++, token++) {
            const int64_t position = step.starts[row] + i, given = step.given_ids[token];
            o.positions[token] = position;
            o.slot_mapping[token] = pages[position / step.page_size] * step.page_size + position % step.page_size;
            o.token_ids[token] = given < 0 ? step.last_tokens[step.sequence_indices[row]] : given;
        }
        for (int64_t value = 0; value < o.num_values; value++)
            std::fill_n(o.token_values + value * o.max_tokens + o.query_starts[row], step.counts[row],
                        o.row_values[value * o.max_rows + row]);
        if (o.position_axes) begin_axes(o, step, row);
    });
}

// Like `embed`, but reads the packed weight of the LM head. Models with tied embeddings store this weight once.
template <class T>
void embed_packed(const void* operands, const Step& step, ThreadGroup& threads) {
    constexpr int N = LANE_SIZE<T>;
    const auto& o = *static_cast<const EmbedOperands*>(operands);
    threads.share(step.num_tokens, [&](int64_t token) {
        const int64_t id = step.token_ids[token];
        const T* from = static_cast<const T*>(o.weight) + id / PANEL * PANEL * o.size + id % PANEL * N;
        T* to = static_cast<T*>(o.out) + token * o.size;
        if (take_medium(o.media, token, to, o.size)) return;
        for (int64_t k = 0; k < o.size; k += N, from += PANEL * N) std::memcpy(to + k, from, N * sizeof(T));
        scale_line(to, o.size, o.scale);
    });
}

struct EmbedGroupsOperands {
    Product4Operands weight;  // [V, E]; only the fields that describe the packing are used
    void* out;                // [T, E]
    float scale;              // factor of the vectors
    Media media;
};

// Like `embed`, but reads a grouped weight.
template <class T>
void embed_groups(const void* operands, const Step& step, ThreadGroup& threads) {
    typedef typename ScaleOf<T>::Type Scale;
    const auto& o = *static_cast<const EmbedGroupsOperands*>(operands);
    const auto& w = o.weight;
    const int64_t size = w.plain.in_size, bytes = panel_bytes4<T>(size, w.group, w.shifted, w.bits);
    threads.share(step.num_tokens, [&](int64_t token) {
        const int64_t id = step.token_ids[token], column = id % PANEL;
        const uint8_t* panel = static_cast<const uint8_t*>(w.plain.weight) + id / PANEL * bytes;
        T* to = static_cast<T*>(o.out) + token * size;
        if (take_medium(o.media, token, to, size)) return;
        with_codes(w.bits, [&](auto code) {
            for (int64_t first = 0; first < size; first += w.group, panel += w.group * PANEL / 8 * w.bits) {
                const Scale* scales = reinterpret_cast<const Scale*>(panel) + column;
                panel += (1 + w.shifted) * PANEL * sizeof(Scale);
                const float scale = get_scale(scales), shift = w.shifted ? get_scale(scales + PANEL) : 0.0f;
                for (int64_t k = 0; k < w.group; k++) {
                    const int32_t number = code.number(panel, k, column);
                    const float value = w.bits == 4 ? w.table[number + code.MIDDLE] : float(number);
                    narrow(to + first + k, value * scale + shift);
                }
            }
        });
        scale_line(to, size, o.scale);
    });
}

struct LastOperands {
    const void* hidden;  // [T, E]
    void* out;           // [R, E], hidden states of the sampled positions
    int64_t size;        // E
};

template <class T>
void last(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const LastOperands*>(operands);
    threads.share(step.num_samples, [&](int64_t sample) {
        const int64_t token = step.sample_positions[sample];
        std::memcpy(static_cast<T*>(o.out) + sample * o.size, static_cast<const T*>(o.hidden) + token * o.size,
                    o.size * sizeof(T));
    });
}

struct PoolRowsOperands {
    const void* hidden;  // [T, E]
    float* out;          // [B, E]
    int64_t size;        // E
    int64_t mean;        // whether to compute the mean of each row's tokens; otherwise each row's first token is taken
    int64_t normalized;  // whether to scale the vectors to length 1
};

// Computes the embedding of each text: see Pooler (runtime/layers/pooler.py). A task is a row.
template <class T>
void pool_rows(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const PoolRowsOperands*>(operands);
    threads.share(step.num_rows, [&](int64_t row) {
        const T* const first = static_cast<const T*>(o.hidden) + step.query_starts[row] * o.size;
        const int64_t tokens = o.mean ? step.counts[row] : 1;
        float* const out = o.out + row * o.size;
        Floats squares{};
        in_vectors(o.size, [&](int64_t k, int64_t count) {
            Floats total{};
            for (int64_t token = 0; token < tokens; token++) total += load(first + token * o.size + k, count);
            total = total / float(tokens);
            squares += total * total;
            store(out + k, total, count);
        });
        constexpr float LEAST = 1e-12f;  // the epsilon of torch.nn.functional.normalize
        const float length = std::max(std::sqrt(sum(squares)), LEAST);
        if (o.normalized)
            in_vectors(o.size, [&](int64_t k, int64_t count) { store(out + k, load(out + k, count) / length, count); });
    });
}

// For each lane, the best logit of a row that one thread has computed.
struct Best {
    Floats value[2];
    Ints panel[2];  // panel of the logit
    Ints broken;    // not 0 if a logit was NaN
};

struct ChooseOperands {
    Best* best;       // scratch [threads, max_samples]
    int64_t* ids;     // [R]
    uint8_t* sound;   // [R]
    int64_t max_samples;
    Product8Operands product;  // `out` is not used; unless weights have 8 bits, only `plain` is used
    Product4Operands product4;  // used instead of `product` if weights have 4 bits
};

// Updates the largest value in each lane. Among equal values, it keeps the value of the lowest panel.
inline void note(Best& best, const Floats (&sums)[2], int64_t panel, int64_t out_size) {
    for (int half = 0; half < 2; half++) {
        Floats value = sums[half];
        const int64_t width = out_size - panel * PANEL - half * LANES;
        for (int64_t lane = std::max<int64_t>(0, width); lane < LANES; lane++)
            value[lane] = -std::numeric_limits<float>::infinity();
        best.broken |= value != value;
        // A thread that takes tasks from other threads' shares may compute lower panels after higher panels.
        const Ints before = (value == best.value[half]) & (Ints{} + int32_t(panel) < best.panel[half]);
        const Ints better = (value > best.value[half]) | before;
        best.value[half] = better ? value : best.value[half];
        best.panel[half] = better ? Ints{} + int32_t(panel) : best.panel[half];
    }
}

// Chooses the best token from the lanes of all threads. Among equal logits, it chooses the lowest id.
inline void choose_best(const ChooseOperands& o, const Step& step, const ThreadGroup& threads, int64_t sample) {
    float value = -std::numeric_limits<float>::infinity();
    int64_t id = 0;
    bool sound = true;
    for (int rank = 0; rank < threads.size; rank++) {
        const Best& best = o.best[rank * o.max_samples + sample];
        for (int lane = 0; lane < 2 * LANES; lane++) {
            const float found = best.value[lane / LANES][lane % LANES];
            const int64_t candidate = int64_t(best.panel[lane / LANES][lane % LANES]) * PANEL + lane;
            sound &= best.broken[lane % LANES] == 0;
            if (found > value || (found == value && candidate < id)) {
                value = found;
                id = candidate;
            }
        }
    }
    sound &= std::isfinite(value);
    o.sound[sample] = sound;
    o.ids[sample] = sound ? id : 0;
    if (step.sample_sequences[sample] >= 0) step.last_tokens[step.sample_sequences[sample]] = o.ids[sample];
}

// BITS: bits per weight; 0: weights of type T.
template <class T, int BITS>
void choose(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const ChooseOperands*>(operands);
    Best* mine = o.best + threads.rank * o.max_samples;
    const Floats nothing = fill(-std::numeric_limits<float>::infinity());
    threads.share(threads.size, [&](int64_t rank) {  // also for threads that have not joined this node
        for (int64_t sample = 0; sample < step.num_samples; sample++)
            o.best[rank * o.max_samples + sample] = Best{{nothing, nothing}, {Ints{}, Ints{}}, Ints{}};
    });
    threads.barrier();
    const auto put = [&](int64_t row, int64_t panel, const Floats (&sums)[2]) {
        note(mine[row], sums, panel, BITS == 4 ? o.product4.plain.out_size : o.product.plain.out_size);
    };
    if constexpr (BITS == 4)
        multiply4<T>(o.product4, threads, step.num_samples, put);
    else if constexpr (BITS == 8)
        multiply8<T>(o.product, threads, step.num_samples, put);
    else
        multiply<T>(o.product.plain, threads, step.num_samples, put);
    threads.barrier();
    threads.share(step.num_samples, [&](int64_t sample) { choose_best(o, step, threads, sample); });
}

}  // namespace penstock
