// Bidirectional attention of encoders (contract: ops/encoder_attention/__init__.py): a token attends to its whole row,
// or to the tokens near it, without a cache.
//
// A task computes consecutive tokens of a row for one head. Keys are divided into blocks from the row's start. Each
// block has its own softmax, and blocks are merged in order as in attention.h, so a row's result does not depend on its
// batch.
#pragma once

#include <algorithm>

#include "attention.h"

namespace penstock {

struct AttendBidirectionalOperands {
    const void* q;  // [T, H, D], tokens q_stride elements apart, heads D apart
    const void* k;
    const void* v;
    void* out;      // [T, H, D], contiguous
    int64_t q_stride, k_stride, v_stride;
    int64_t num_heads, head_dim;  // D, a multiple of 16
    int64_t reach;  // visible positions on each side; negative: all
    float scale;
};

// Attention of one head for `num_tokens` tokens of a row, starting at its token `first`.
template <class T>
class RowTile {
public:
    RowTile(const AttendBidirectionalOperands& given, int64_t row_start, int64_t count, int64_t first, int64_t num_tokens,
             int64_t head, bool ahead, Workspace& workspace)
        : given_(given), row_start_(row_start), count_(count), first_(first), rows_(num_tokens), head_(head),
          ahead_(ahead ? given.head_dim : 0), workspace_(workspace), head_dim_(given.head_dim), filled_(head_dim_ / PER_WORD<T>),
          words_(words_with_padding<T>(head_dim_)), scoring_{given.scale * LOG2_E, 0, 0} {}

    void attend() {
        gather_queries();
        const int64_t low = first_seen(first_), high = end_seen(first_ + rows_ - 1);
        const int64_t begin = low / KEY_BLOCK, end = (high + KEY_BLOCK - 1) / KEY_BLOCK;
        for (int64_t block = begin; block < end; block++) {
            const int64_t base = block * KEY_BLOCK;
            pack(base, std::max<int64_t>(low - base, 0), std::min(high - base, KEY_BLOCK));
            for (int64_t row = 0; row < rows_; row += CHUNK) {
                const int64_t rows = std::min(CHUNK, rows_ - row);
                Partial all{workspace_.out + row * head_dim_, workspace_.masses + row};
                if (block == begin) {
                    attend_rows(base, row, rows, all);
                    continue;
                }
                Mass masses[CHUNK];
                attend_rows(base, row, rows, {workspace_.part, masses});
                for (int64_t r = 0; r < rows; r++)
                    merge(all.sums + r * head_dim_, all.masses[r], workspace_.part + r * head_dim_, masses[r], head_dim_);
            }
        }
        finish();
    }

private:
    const AttendBidirectionalOperands& given_;
    const int64_t row_start_, count_, first_, rows_, head_;
    const int64_t ahead_;  // elements from this head's keys to the next head's, to prefetch them; 0: no prefetch
    Workspace& workspace_;
    const int64_t head_dim_, filled_, words_;  // as in TileOfHead
    const Scoring scoring_;

    static int64_t grain() { return std::max<int64_t>(LANES, PER_WORD<T> * step_grain<T>()); }

    int64_t first_seen(int64_t position) const {
        return given_.reach < 0 ? 0 : std::max<int64_t>(0, position - given_.reach);
    }

    int64_t end_seen(int64_t position) const {
        return given_.reach < 0 ? count_ : std::min(count_, position + given_.reach + 1);
    }

    void gather_queries() {
        const T* query = static_cast<const T*>(given_.q) + (row_start_ + first_) * given_.q_stride + head_ * head_dim_;
        uint32_t* words = workspace_.queries;
        for (int64_t r = 0; r < rows_; r++, query += given_.q_stride, words += words_) {
            if (ahead_) fetch(query + ahead_, head_dim_);
            for (int64_t w = 0; w < filled_; w += 8) {
                const Eight x = words_of(query + w * PER_WORD<T>);
                std::memcpy(words + w, &x, sizeof(x));
            }
            std::fill(words + filled_, words + words_, 0u);
        }
    }

    // Packs the keys and values at positions base + low .. base + high - 1, padded with zeros to whole grains.
    void pack(int64_t base, int64_t low, int64_t high) {
        const int64_t begin = low / grain() * grain(), end = round_up(high, grain());
        T *few_keys = reinterpret_cast<T*>(workspace_.few), *few_values = few_keys + LANES * head_dim_;
        for (int64_t i = begin; i < end; i += LANES) {
            const int64_t token = row_start_ + base + i, head = head_ * head_dim_;
            const T* keys = static_cast<const T*>(given_.k) + token * given_.k_stride + head;
            const T* values = static_cast<const T*>(given_.v) + token * given_.v_stride + head;
            int64_t k_stride = given_.k_stride, v_stride = given_.v_stride;
            for (int64_t key = 0; ahead_ && key < std::min<int64_t>(LANES, high - i); key++)
                fetch(keys + key * k_stride + ahead_, head_dim_), fetch(values + key * v_stride + ahead_, head_dim_);
            if (i < low || i + LANES > high) {
                std::memset(workspace_.few, 0, 2 * LANES * head_dim_ * sizeof(T));
                for (int64_t key = std::max(i, low) - i; key < std::min<int64_t>(LANES, high - i); key++) {
                    std::memcpy(few_keys + key * head_dim_, keys + key * k_stride, head_dim_ * sizeof(T));
                    std::memcpy(few_values + key * head_dim_, values + key * v_stride, head_dim_ * sizeof(T));
                }
                keys = few_keys, values = few_values, k_stride = v_stride = head_dim_;
            }
            uint32_t* const packed = workspace_.keys + i * words_;
            pack_keys<T>(keys, k_stride, head_dim_, packed, nullptr);
            std::fill(packed + LANES * filled_, packed + LANES * words_, 0u);
            pack_values<T>(values, v_stride, head_dim_, workspace_.values + i / PER_WORD<T> * head_dim_, nullptr);
        }
    }

    void attend_rows(int64_t base, int64_t row, int64_t rows, const Partial& part) {
        const int64_t last_row = first_ + row + rows - 1;
        const int64_t low = std::clamp<int64_t>(first_seen(first_ + row) - base, 0, KEY_BLOCK);
        const int64_t high = std::clamp<int64_t>(end_seen(last_row) - base, 0, KEY_BLOCK);
        const int64_t first = low / grain() * grain(), last = round_up(high, grain());
        if (first >= last) {
            std::fill(part.masses, part.masses + rows, Mass{NO_SCORE, 0});
            std::fill(part.sums, part.sums + rows * head_dim_, 0.0f);
            return;
        }
        const Factors scores{workspace_.queries + row * words_, words_, workspace_.keys + first * words_, LANES,
                             words_ * LANES, words_};
        dot_all<T>(workspace_.unit, scores, rows, (last - first) / LANES, workspace_.scores + first, KEY_BLOCK);
        constexpr int64_t weight_words = KEY_BLOCK / PER_WORD<T>;
        using Weight = std::conditional_t<PER_WORD<T> == 2, BFloat16, float>;
        const auto low_of = [&](int64_t r) {
            return std::clamp<int64_t>(first_seen(first_ + row + r) - base, 0, KEY_BLOCK);
        };
        const auto high_of = [&](int64_t r) {
            return std::clamp<int64_t>(end_seen(first_ + row + r) - base, 0, KEY_BLOCK);
        };
        constexpr bool SHORT = sizeof(T) == sizeof(BFloat16);
        float* const scored = workspace_.scores;
        for (int64_t r = 0; r < rows; r++)
            part.masses[r].largest = top_score<false>(scored + r * KEY_BLOCK, scoring_, low_of(r), high_of(r));
        for (int64_t r = 0; r < rows; r++) {
            Weight* const weights = reinterpret_cast<Weight*>(workspace_.weights + r * weight_words);
            part.masses[r].total = weigh_below<false, SHORT>(part.masses[r].largest, scored + r * KEY_BLOCK, scoring_, low_of(r),
                                                      high_of(r), first, last, weights);
        }
        const Factors values{workspace_.weights + first / PER_WORD<T>, weight_words,
                             workspace_.values + first / PER_WORD<T> * head_dim_, head_dim_, LANES,
                             (last - first) / PER_WORD<T>};
        dot_all<T>(workspace_.unit, values, rows, head_dim_ / LANES, part.sums, head_dim_);
    }

    void finish() {
        for (int64_t r = 0; r < rows_; r++) {
            const float share = 1 / workspace_.masses[r].total;
            T* out = static_cast<T*>(given_.out) + ((row_start_ + first_ + r) * given_.num_heads + head_) * head_dim_;
            for (int64_t d = 0; d < head_dim_; d += LANES)
                store(out + d, load(workspace_.out + r * head_dim_ + d) * share);
        }
    }
};

template <class T>
void attend_bidirectional(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& given = *static_cast<const AttendBidirectionalOperands*>(operands);
    const int64_t fair = step.num_tokens * given.num_heads / (6 * threads.size);
    const int64_t tokens = std::clamp<int64_t>(fair, CHUNK, TILE_ROWS);
    // Neighbouring heads are adjacent in memory. Therefore a task has several heads, if each thread still gets several
    // tasks.
    const int64_t tiles = std::max(step.num_rows, step.num_tokens / tokens);
    const int64_t heads = std::clamp<int64_t>(tiles * given.num_heads / (8 * threads.size), 1, given.num_heads);
    const int64_t parts = (given.num_heads + heads - 1) / heads;
    Workspace workspace(tokens, given.head_dim, words_with_padding<T>(given.head_dim));
    int64_t mine = threads.take(), begin = 0;
    for (int64_t row = 0; row < step.num_rows; row++) {
        const int64_t count = step.counts[row];
        for (int64_t first = 0; first < count; first += tokens, begin += parts)
            for (; mine < begin + parts; mine = threads.take()) {
                const int64_t end = std::min((mine - begin + 1) * heads, given.num_heads);
                for (int64_t head = (mine - begin) * heads; head < end; head++)
                    RowTile<T>(given, step.query_starts[row], count, first, std::min(tokens, count - first), head,
                                head + 1 < end, workspace)
                        .attend();
            }
    }
}

}  // namespace penstock
