// Rows that begin with the same pages: a system prompt has its keys in the cache once, however many ask.
//
// Whole blocks of keys before all new tokens of such rows are read for all of them together, by tiles made of tokens of
// any of them. What those give waits in the parts, from where each row's own tiles go on. Every query still
// meets its blocks one by one and in order, so that sharing does not show in any bit of the results.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "attend_block.h"
#include "attend_operands.h"
#include "step.h"

namespace penstock {

// The blocks 0 .. num_blocks - 1, for tokens of several rows.
struct SharedPrefix {
    int64_t row;            // one of them, whose page table names the pages
    int64_t num_blocks;
    const int64_t* tokens;  // of all rows, each as its index in the batch
    int64_t num_tokens;
    int64_t parts = 0;      // where the first part begins
    int64_t num_parts = 1;  // for each kv head: one for all blocks or one for each

    bool divided() const { return num_parts > 1; }
};

class SharedPrefixes {
public:
    // Finds those of a step. Of the parts it takes `used()` floats.
    void find(const AttendOperands& given, const Step& step, int64_t num_threads) {
        waiting_.clear(), tokens_.clear(), prefixes_.clear();
        used_ = 0;
        if (given.window || given.slopes) return;  // what slopes take off differs by row
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

    // What this row shares, or null.
    const SharedPrefix* of(int64_t row) const {
        return prefixes_.empty() || members_[row].prefix < 0 ? nullptr : &prefixes_[members_[row].prefix];
    }

    int64_t num_blocks(int64_t row) const {
        const SharedPrefix* prefix = of(row);
        return prefix ? prefix->num_blocks : 0;
    }

    // Where the tokens of a row that shares begin among its prefix's.
    int64_t first_token(int64_t row) const { return members_[row].first_token; }

private:
    struct Waiting {
        int64_t row;
        int32_t page;  // the first one, or -1 where the row waits no longer
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

    // The rows that share most with this one, as far as there is room for their tokens.
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
        for (size_t i = 0; i <= best; i++) members_[waiting_[candidates_[i].waiting].row] = {};  // nothing is saved
        tokens_.resize(before);
    }

    // One part for each prefix; more for those that are too much for one task, as far as there is room.
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
