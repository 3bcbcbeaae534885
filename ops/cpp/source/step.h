// What every kernel of one step reads: where each row stands in the cache (see ops.attention.AttentionMetadata).
#pragma once

#include <cstdint>

#include "thread_group.h"

namespace penstock {

struct Step {
    int64_t num_tokens;           // T
    int64_t num_rows;             // B
    const int64_t* token_ids;     // [T]
    const int64_t* positions;     // [T]
    const int64_t* slot_mapping;  // [T], page * page_size + offset
    const int32_t* page_table;    // [B, table_width]
    int64_t table_width;
    const int32_t* starts;        // [B]
    const int32_t* counts;        // [B]
    const int32_t* query_starts;  // [B + 1]
    int64_t page_size;
    // Of a step that is computed whole, from the batch to its tokens (see whole.h):
    const int32_t* given_ids;     // [T], negative where the slot's last token is to be taken
    const int32_t* sequence_indices;  // in last_tokens, [B]
    int64_t* last_tokens;         // [sequences]
    int64_t num_samples;          // R
    const int32_t* sample_rows;   // [R]
};

// Whether a kernel for rows of fewer than `below` tokens leaves this one out; 0: it leaves out none.
inline bool is_left_out(const Step& step, int64_t row, int64_t below) { return below && step.counts[row] >= below; }

// Calls work(first, end) for the tokens of first .. end - 1 but those in rows that are left out, as seldom as it can.
template <class Work>
inline void each_run(const Step& step, int64_t below, int64_t first, int64_t end, const Work& work) {
    if (below && step.num_tokens >= below)
        for (int64_t row = 0; row < step.num_rows && step.query_starts[row] < end; row++) {
            const int64_t begin = step.query_starts[row], behind = begin + step.counts[row];
            if (behind <= first || !is_left_out(step, row, below)) continue;
            if (first < begin) work(first, begin);
            first = behind;
        }
    if (first < end) work(first, end);
}

// One kernel with its operands. A kernel is entered by one thread of the group or more, with no task taken, and may
// return on each as soon as that has nothing left to do: the next one begins when all of them have. Whatever is not a
// task (`share`, `take`) is done by each that is there, so it must not matter which are.
struct GraphNode {
    void (*kernel)(const void* operands, const Step& step, ThreadGroup& threads);
    const void* operands;
};

}  // namespace penstock
