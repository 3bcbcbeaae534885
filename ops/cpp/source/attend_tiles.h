// Division of a step's attention into tasks.
#pragma once

#include <algorithm>

#include "attend_block.h"
#include "attend_operands.h"
#include "attend_shared.h"
#include "step.h"

namespace penstock {

// Tokens of one row of the step (or of a shared prefix) for one kv head. Within a tile, a row is a pair of a token and
// a query head: row r is head r % group of token r / group.
struct Tile {
    int64_t row;                           // index of the row in the step
    int64_t first_token, num_tokens;       // within the row, or within the prefix
    int64_t first_block, end_block;        // blocks of keys
    int64_t parts;                         // offset of the partial results if the keys are divided, else -1
    const SharedPrefix* prefix = nullptr;  // the shared prefix that the tile computes, or null
};

// Tiles of a step. Every thread computes the same list.
class Tiles {
public:
    Tiles(const AttendOperands& given, const Step& step, const SharedPrefixes& shared, int64_t num_threads)
        : given_(given), step_(step), shared_(shared), group_(given.num_heads / given.num_kv_heads) {
        int64_t tokens = 0;
        for (int64_t row = 0; row < step.num_rows; row++)
            if (!is_left_out(step, row, given.below)) tokens += step.counts[row];
        const int64_t fair = tokens * given.num_kv_heads / (6 * num_threads);
        tokens_ = std::clamp(fair, (32 + group_ - 1) / group_, std::max<int64_t>(1, TILE_ROWS / group_));
        int64_t cost = 0;
        each_undivided([&](const Tile& tile) { cost += cost_of_keys(tile); });
        limit_ = cost * given.num_kv_heads / (DIVISION * num_threads);
    }

    int64_t group() const { return group_; }
    int64_t max_rows() const { return std::max(tokens_, shared_.all().empty() ? 0 : shared_.tile_tokens()) * group_; }
    const SharedPrefixes& shared() const { return shared_; }
    int64_t size_of_part(const Tile& tile) const { return part_size(tile.num_tokens * group_, given_.head_dim); }

    // Calls visit(tile) for the tiles of shared prefixes.
    template <class Visit>
    void each_shared(Visit visit) const {
        for (const SharedPrefix& prefix : shared_.all())
            for (int64_t first = 0; first < prefix.num_tokens; first += shared_.tile_tokens()) {
                const int64_t tokens = std::min(shared_.tile_tokens(), prefix.num_tokens - first);
                visit(Tile{prefix.row, first, tokens, 0, prefix.num_blocks, -1, &prefix});
            }
    }

    // Calls visit(tile) for the other tiles. For each row it starts at the end, where tiles are most expensive.
    template <class Visit>
    void each(Visit visit) const {
        int64_t used = shared_.used();
        each_undivided([&](Tile tile) {
            const int64_t blocks = tile.end_block - tile.first_block;
            const int64_t needed = given_.num_kv_heads * blocks * size_of_part(tile);
            if (blocks > 1 && cost_of_keys(tile) > limit_ && used + needed <= given_.num_parts) {
                tile.parts = used;
                used += needed;
            }
            visit(tile);
        });
    }

    int64_t first_key(int64_t position) const {
        if (!given_.window) return 0;
        return given_.chunked ? position - position % given_.window : std::max<int64_t>(0, position - given_.window + 1);
    }

private:
    const AttendOperands& given_;
    const Step& step_;
    const SharedPrefixes& shared_;
    const int64_t group_;
    int64_t tokens_;  // maximum number of tokens per tile
    int64_t limit_;   // cost above which a tile's keys are divided

    int64_t cost_of_keys(const Tile& tile) const {
        return cost_of(tile.end_block - tile.first_block, tile.num_tokens * group_);
    }

    template <class Visit>
    void each_undivided(Visit visit) const {
        for (int64_t row = 0; row < step_.num_rows; row++) {
            if (is_left_out(step_, row, given_.below)) continue;
            const int64_t start = step_.starts[row], count = step_.counts[row], shared = shared_.num_blocks(row);
            for (int64_t first = (count - 1) / tokens_ * tokens_; first >= 0 && count > 0; first -= tokens_) {
                const int64_t tokens = std::min(tokens_, count - first);
                const int64_t begin = std::max(shared, first_key(start + first) / KEY_BLOCK);
                const int64_t end = start + first + tokens;
                visit(Tile{row, first, tokens, begin, (end + KEY_BLOCK - 1) / KEY_BLOCK, -1});
            }
        }
    }
};

}  // namespace penstock
