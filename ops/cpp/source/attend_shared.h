// Rows that begin with the same pages, for example with the same system prompt.
//
// The whole blocks of keys that precede all new tokens of these rows are read once, by tiles with tokens of several
// rows. The partial results are stored in `parts`, and each row's own tiles continue from them. Each query still
// processes its blocks in order, so sharing does not change any bit of the results.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "attend_block.h"
#include "attend_operands.h"
#include "step.h"

namespace penstock {

// Blocks 0 .. num_blocks - 1, shared by several rows.
struct SharedPrefix {
    int64_t row;            // one of the rows; its page table has the pages
    int64_t num_blocks;
    const int64_t* tokens;  // tokens of all rows, as indices in the batch
    int64_t num_tokens;
    int64_t parts = 0;      // offset of the first part
    int64_t num_parts = 1;  // number of parts per kv head: one for all blocks, or one per block

    bool divided() const { return num_parts > 1; }
};

class SharedPrefixes {
public:
    // Finds the shared prefixes of a step. Their partial results take the first `used()` floats of `parts`.
    void find(const AttendOperands& given, const Step& step, int64_t num_threads) {
        waiting_.clear(), tokens_.clear(), prefixes_.clear();
        used_ = 0;
        if (given.window || given.slopes) return;  // with slopes, scores depend on the row's position
        for (int64_t row = 0; row < step.num_rows; row++)
            if (step.counts[row] > 0 && step.starts[row] >= KEY_BLOCK && !is_left_out(step, row, given.below))
                waiting_.push_back({row, step.page_table[row * step.table_width]});
        if (waiting_.size() < 2) return;
        members_.assign(step.num_rows, Member{});
        tokens_.reserve(step.num_tokens);
        const int64_t group = given.num_heads / given.num_kv_heads;
        tile_tokens_ = std::max<int64_t>(1, TILE_ROWS / group);
        const int64_t token_size = given.num_kv_heads * part_size(group, given.head_dim);
        for (size_t i = 0; i + 1 < waiting_.size(); i++)
            if (waiting_[i].page >= 0) gather(step, i, given.num_parts / token_size);
        assign_parts(given, group, token_size, num_threads);
    }

    const std::vector<SharedPrefix>& all() const { return prefixes_; }
    int64_t used() const { return used_; }
    int64_t tile_tokens() const { return tile_tokens_; }

    // Returns the row's shared prefix, or null.
    const SharedPrefix* of(int64_t row) const {
        return prefixes_.empty() || members_[row].prefix < 0 ? nullptr : &prefixes_[members_[row].prefix];
    }

    int64_t num_blocks(int64_t row) const {
        const SharedPrefix* prefix = of(row);
        return prefix ? prefix->num_blocks : 0;
    }

    // Index of the row's first token among the prefix's tokens.
    int64_t first_token(int64_t row) const { return members_[row].first_token; }

private:
    struct Waiting {
        int64_t row;
        int32_t page;  // the first page, or -1 if the row is already assigned
    };
    struct Candidate {
        size_t waiting;
        int64_t num_blocks;
    };
    struct Member {
        int64_t prefix = -1;
        int64_t first_token = 0;
    };

    std::vector<Waiting> waiting_;
    std::vector<Candidate> candidates_;
    std::vector<Member> members_;
    std::vector<int64_t> tokens_;
    std::vector<SharedPrefix> prefixes_;
    int64_t tile_tokens_ = 1;
    int64_t used_ = 0;

    static int64_t common_blocks(const Step& step, int64_t row, int64_t other) {
        const int32_t *const pages = step.page_table + row * step.table_width,
                      *const others = step.page_table + other * step.table_width;
        const int64_t most = std::min(step.starts[row], step.starts[other]) / KEY_BLOCK;
        for (int64_t block = 0; block < most; block++) {
            const int64_t first = block * KEY_BLOCK / step.page_size;
            const int64_t end = ((block + 1) * KEY_BLOCK - 1) / step.page_size + 1;
            if (std::memcmp(pages + first, others + first, (end - first) * sizeof(int32_t))) return block;
        }
        return most;
    }

    // Makes a prefix of the rows that save the most by sharing blocks with the row number `first` of the waiting rows.
    // `room` is the number of tokens for which there is memory.
    void gather(const Step& step, size_t first, int64_t room) {
        const Waiting leader = waiting_[first];
        candidates_.assign(1, {first, step.starts[leader.row] / KEY_BLOCK});
        for (size_t i = first + 1; i < waiting_.size(); i++) {
            if (waiting_[i].page != leader.page) continue;
            const int64_t blocks = common_blocks(step, leader.row, waiting_[i].row);
            if (blocks) candidates_.push_back({i, blocks});
        }
        if (candidates_.size() == 1) return;
        std::sort(candidates_.begin() + 1, candidates_.end(), [](const Candidate& a, const Candidate& b) {
            return a.num_blocks != b.num_blocks ? a.num_blocks > b.num_blocks : a.waiting < b.waiting;
        });
        size_t best = 1;
        for (size_t i = 2; i < candidates_.size(); i++)
            if (int64_t(i) * candidates_[i].num_blocks >= int64_t(best) * candidates_[best].num_blocks) best = i;
        const int64_t before = tokens_.size(), num_blocks = candidates_[best].num_blocks;
        int64_t num_tiles = 0;
        for (size_t i = 0; i <= best; i++) {
            const int64_t row = waiting_[candidates_[i].waiting].row, count = step.counts[row];
            waiting_[candidates_[i].waiting].page = -1;
            if (int64_t(tokens_.size()) + count > room) continue;
            members_[row] = {int64_t(prefixes_.size()), int64_t(tokens_.size()) - before};
            num_tiles += (count + tile_tokens_ - 1) / tile_tokens_;
            for (int64_t token = 0; token < count; token++) tokens_.push_back(step.query_starts[row] + token);
        }
        const int64_t num_tokens = tokens_.size() - before;
        if (num_tiles > (num_tokens + tile_tokens_ - 1) / tile_tokens_) {
            prefixes_.push_back({leader.row, num_blocks, tokens_.data() + before, num_tokens});
            return;
        }
        // sharing would save nothing
        for (size_t i = 0; i <= best; i++) members_[waiting_[candidates_[i].waiting].row] = {};
        tokens_.resize(before);
    }

    // Assigns memory for one part to each prefix. A prefix that is too large for one task gets one part per block, if
    // there is enough memory.
    void assign_parts(const AttendOperands& given, int64_t group, int64_t token_size, int64_t num_threads) {
        int64_t cost = 0, room = given.num_parts / token_size - int64_t(tokens_.size());
        for (const SharedPrefix& prefix : prefixes_) cost += cost_of(prefix.num_blocks, prefix.num_tokens * group);
        const int64_t limit = cost * given.num_kv_heads / (DIVISION * num_threads);
        for (SharedPrefix& prefix : prefixes_) {
            const int64_t rows = std::min(prefix.num_tokens, tile_tokens_) * group;
            const int64_t further = (prefix.num_blocks - 1) * prefix.num_tokens;
            if (cost_of(prefix.num_blocks, rows) > limit && further <= room) {
                prefix.num_parts = prefix.num_blocks;
                room -= further;
            }
            prefix.parts = used_;
            used_ += prefix.num_parts * prefix.num_tokens * token_size;
        }
    }
};

}  // namespace penstock
