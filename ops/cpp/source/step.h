// The rows of one step, which all kernels of the step read (see ops.attention.AttentionMetadata).
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
    // Only for a step that is captured from the batch's arrays to the chosen tokens (see whole.h):
    const int32_t* given_ids;     // [T], negative: take the sequence's last token
    const int32_t* sequence_indices;  // [B], indices in last_tokens
    int64_t* last_tokens;         // [sequences]
    int64_t num_samples;          // N
    const int32_t* sample_positions;  // [N], indices of sampled positions in the T tokens
    const int32_t* sample_sequences;  // [N], indices in last_tokens; negative: the chosen token is not stored
    const int32_t* position_offsets;  // [3, T], offset of each axis from the position; null: 0
};

// Returns whether a kernel for rows with fewer than `below` tokens skips this row. If `below` is 0, no row is skipped.
inline bool is_left_out(const Step& step, int64_t row, int64_t below) { return below && step.counts[row] >= below; }

// Calls work(first, end) for runs of tokens in first .. end - 1 whose rows are not skipped, with as few calls as possible.
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

// One kernel with its operands. Any number of the group's threads run it; at least one does. A thread may enter only
// before the kernel's first barrier, and returns when it finds no further task. The next kernel starts after all these
// threads have returned. Code outside of tasks (`share`, `take`) runs on each of them, so it must not depend on their
// number.
struct GraphNode {
    void (*kernel)(const void* operands, const Step& step, ThreadGroup& threads);
    const void* operands;
};

}  // namespace penstock
