// Attention over the paged cache (contract: ops/attention/__init__.py).
//
// A tile has consecutive tokens of a row, with all query heads of one kv head. A decode row is a tile of one token. If
// there are too few tiles, the keys of a tile are also divided, block by block. The results of these blocks are then
// merged in the order in which a single thread merges them.
//
// Blocks of keys that several rows share are computed first, once for all these rows (attend_shared.h).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

#include "attend_block.h"
#include "attend_operands.h"
#include "attend_shared.h"
#include "attend_tiles.h"
#include "step.h"

namespace penstock {

constexpr int64_t AHEAD = 16;  // number of keys that are prefetched
#if defined(PENSTOCK_MATRIX_UNIT)
constexpr int64_t CHUNK = UNIT_ROWS;  // rows whose scores of a block are in memory at a time
#else
constexpr int64_t CHUNK = 24;
#endif

// Scratch memory of one thread.
struct Workspace {
    uint32_t* queries;  // [rows, words]
    uint32_t* keys;     // [KEY_BLOCK / 16, words, 16]
    uint32_t* values;   // [KEY_BLOCK words, D]
    uint32_t* weights;  // [CHUNK, KEY_BLOCK words]
    float* scores;      // [CHUNK, KEY_BLOCK]
    float* part;        // [CHUNK, D]
    float* out;         // [rows, D]
    Mass* masses;       // [rows]
    uint32_t* few;      // [2, 16, D]: copies of keys and values that are not contiguous
    uint32_t* few_queries;  // [words, 4]
    MatrixUnit unit;

    // `words`: number of words of a query or key.
    Workspace(int64_t rows, int64_t head_dim, int64_t words) {
        const int64_t padded = round_up(rows, 8);  // so that the masses end at a cache line
        uint32_t* next = space(2 * padded + rows * (words + head_dim) + KEY_BLOCK * (words + head_dim) +
                               CHUNK * (2 * KEY_BLOCK + head_dim) + 2 * LANES * head_dim + UNIT_FEW * words);
        const auto take = [&next](int64_t size) { return std::exchange(next, next + size); };
        queries = take(rows * words);
        keys = take(KEY_BLOCK * words);
        values = take(KEY_BLOCK * head_dim);
        weights = take(CHUNK * KEY_BLOCK);
        scores = reinterpret_cast<float*>(take(CHUNK * KEY_BLOCK));
        part = reinterpret_cast<float*>(take(CHUNK * head_dim));
        out = reinterpret_cast<float*>(take(rows * head_dim));
        masses = reinterpret_cast<Mass*>(take(2 * padded));
        few = take(2 * LANES * head_dim);
        few_queries = take(UNIT_FEW * words);
    }

    // Returns this thread's memory, of at least `size` words. Later kernels reuse the memory.
    static uint32_t* space(int64_t size) {
        struct Space {
            uint32_t* begin = nullptr;
            int64_t size = 0;
            ~Space() { std::free(begin); }
        };
        thread_local Space kept;
        if (kept.size < size) {
            std::free(kept.begin);
            kept.begin = static_cast<uint32_t*>(std::aligned_alloc(64, round_up(size * 4, 64)));
            kept.size = kept.begin ? size : 0;
            if (!kept.begin) throw std::bad_alloc();
        }
        return kept.begin;
    }
};

// Results of rows: sums [rows, D] and masses [rows].
struct Partial {
    float* sums;
    Mass* masses;
};

// Number of words of a query or key in products.
template <class T>
inline int64_t words_with_padding(int64_t head_dim) {
    return round_up(head_dim / PER_WORD<T>, step_grain<T>());
}

// Attention of a tile with one kv head.
template <class T>
class TileOfHead {
public:
    TileOfHead(const AttendOperands& given, const Step& step, const Tiles& tiles, const Tile& tile, int64_t kv_head,
               Workspace& workspace)
        : given_(given), step_(step), tiles_(tiles), tile_(tile), kv_head_(kv_head), workspace_(workspace),
          group_(tiles.group()), rows_(tile.num_tokens * group_), head_dim_(given.head_dim),
          filled_(head_dim_ / PER_WORD<T>), words_(words_with_padding<T>(head_dim_)),
          few_(in_unit<T>() && rows_ <= UNIT_FEW),
          position_(tile.prefix ? tile.end_block * KEY_BLOCK : step.starts[tile.row] + tile.first_token),
          token_(step.query_starts[tile.row] + tile.first_token), all_{workspace.out, workspace.masses},
          scoring_{given.scale * LOG2_E, given.soft_cap ? given.scale / given.soft_cap : 0, given.soft_cap * LOG2_E} {}

    void attend() {
        gather_queries();
        begin();
        for (int64_t block = tile_.first_block; block < tile_.end_block; block++) attend_block(block, nullptr);
        finish();
    }

    void attend_part(int64_t block) {
        gather_queries();
        const Partial part = part_of(block);
        attend_block(block, &part);
    }

    void merge_parts() {
        begin();
        for (int64_t block = tile_.first_block; block < tile_.end_block; block++) merge_rows(0, rows_, part_of(block));
        finish();
    }

    // Computes the part number `index` of a shared prefix's tile.
    void attend_shared(int64_t index) {
        gather_queries();
        const Partial part = shared_part(*tile_.prefix, index, tile_.first_token);
        if (tile_.prefix->divided()) return attend_block(index, &part);
        all_ = part;
        clear();
        for (int64_t block = 0; block < tile_.end_block; block++) attend_block(block, nullptr);
    }

private:
    const AttendOperands& given_;
    const Step& step_;
    const Tiles& tiles_;
    const Tile& tile_;
    const int64_t kv_head_;
    Workspace& workspace_;
    const int64_t group_, rows_, head_dim_;
    const int64_t filled_, words_;  // words of a query or key, without and with padding
    const bool few_;  // with few queries, the matrix unit multiplies unpacked keys by packed queries
    const int64_t position_;  // position of the first token; for a shared prefix, a position after all keys
    const int64_t token_;     // index of the first token in the batch
    Partial all_;                // merged result of the blocks computed so far
    const Scoring scoring_;

    Partial part_of(int64_t block) const {
        const int64_t blocks = tile_.end_block - tile_.first_block;
        const int64_t index = kv_head_ * blocks + block - tile_.first_block;
        float* const sums = given_.parts + tile_.parts + index * tiles_.size_of_part(tile_);
        return {sums, reinterpret_cast<Mass*>(sums + rows_ * head_dim_)};
    }

    // Returns a part of the shared prefix, from token `token` on.
    Partial shared_part(const SharedPrefix& prefix, int64_t index, int64_t token) const {
        const int64_t rows = prefix.num_tokens * group_;
        const int64_t before = (kv_head_ * prefix.num_parts + index) * part_size(rows, head_dim_);
        float* const sums = given_.parts + prefix.parts + before;
        return {sums + token * group_ * head_dim_, reinterpret_cast<Mass*>(sums + rows * head_dim_) + token * group_};
    }

    // Number of keys per step of a product with values, at least a vector.
    static int64_t grain() { return std::max<int64_t>(LANES, PER_WORD<T> * step_grain<T>()); }

    int64_t head_of(int64_t r) const { return kv_head_ * group_ + r % group_; }

    int64_t token_of(int64_t r) const {
        return tile_.prefix ? tile_.prefix->tokens[tile_.first_token + r / group_] : token_ + r / group_;
    }

    void gather_queries() {
        for (int64_t r = 0; r < rows_; r++) {
            const int64_t head = head_of(r);
            const T* const token = static_cast<const T*>(given_.q) + token_of(r) * given_.q_stride;
            const T* const query = token + head * head_dim_;
            uint32_t* const words = workspace_.queries + r * words_;
            for (int64_t w = 0; w < filled_; w += 8) {
                const Eight x = words_of(query + w * PER_WORD<T>);
                std::memcpy(words + w, &x, sizeof(x));
            }
            std::fill(words + filled_, words + words_, 0u);
        }
        if (!few_) return;
        std::fill(workspace_.few_queries, workspace_.few_queries + filled_ * UNIT_FEW, 0u);
        for (int64_t r = 0; r < rows_; r++)
            for (int64_t w = 0; w < filled_; w++)
                workspace_.few_queries[w * UNIT_FEW + r] = workspace_.queries[r * words_ + w];
    }

    void clear() {
        std::fill(all_.sums, all_.sums + rows_ * head_dim_, 0.0f);
        std::fill(all_.masses, all_.masses + rows_, Mass{NO_SCORE, 0});
    }

    // Starts with an empty result, or with the result of the row's shared prefix.
    void begin() {
        const SharedPrefix* const prefix = tiles_.shared().of(tile_.row);
        if (!prefix) return clear();
        const int64_t token = tiles_.shared().first_token(tile_.row) + tile_.first_token;
        if (prefix->divided()) {
            clear();
            for (int64_t i = 0; i < prefix->num_parts; i++) merge_rows(0, rows_, shared_part(*prefix, i, token));
            return;
        }
        const Partial part = shared_part(*prefix, 0, token);
        std::copy(part.sums, part.sums + rows_ * head_dim_, all_.sums);
        std::copy(part.masses, part.masses + rows_, all_.masses);
    }

    // Merges the result of a later block into the result of some rows.
    void merge_rows(int64_t row, int64_t rows, const Partial& later) {
        for (int64_t r = 0; r < rows; r++)
            merge(all_.sums + (row + r) * head_dim_, all_.masses[row + r], later.sums + r * head_dim_, later.masses[r],
                  head_dim_);
    }

    // Offset of the key at this position in its pool.
    int64_t offset_of(int64_t position) const {
        const int64_t page = step_.page_table[tile_.row * step_.table_width + position / step_.page_size];
        return ((page * given_.num_kv_heads + kv_head_) * step_.page_size + position % step_.page_size) * head_dim_;
    }

    // Returns a pointer to the pool's element at this offset.
    const T* in_pool(const void* pool, int64_t at) const {
        if (given_.type == ALIKE) return static_cast<const T*>(pool) + at;
        return reinterpret_cast<const T*>(static_cast<const uint8_t*>(pool) + at);
    }

    // Packs the keys and values low .. high - 1 of a block, padded with zeros to whole grains. Meanwhile it prefetches
    // later keys and values at positions before `end`.
    void pack(int64_t block, int64_t low, int64_t high, int64_t end) {
        const int64_t page_size = step_.page_size, head_dim = head_dim_;
        uint32_t* packed_keys = workspace_.keys + low / LANES * LANES * words_;
        uint32_t* packed_values = workspace_.values + low / LANES * LANES / PER_WORD<T> * head_dim;
        std::fill(workspace_.values + low / grain() * grain() / PER_WORD<T> * head_dim, packed_values, 0u);
        for (int64_t i = low / LANES * LANES; i < high; i += LANES) {
            const int64_t position = block * KEY_BLOCK + i, later = position + AHEAD;
            const int64_t at = offset_of(position), ahead = later < end && page_size >= LANES ? offset_of(later) : at;
            const T *keys = in_pool(given_.k_pool, at), *values = in_pool(given_.v_pool, at);
            if (i < low || i + LANES > high || position % page_size + LANES > page_size || given_.type != ALIKE) {
                T *few_keys = reinterpret_cast<T*>(workspace_.few), *few_values = few_keys + LANES * head_dim;
                std::memset(workspace_.few, 0, 2 * LANES * head_dim * sizeof(T));
                for (int64_t k = std::max(i, low); k < std::min(i + LANES, high); k++) {
                    const int64_t from = offset_of(block * KEY_BLOCK + k);
                    read_cached(given_.type, given_.k_pool, from, few_keys + (k - i) * head_dim, head_dim);
                    read_cached(given_.type, given_.v_pool, from, few_values + (k - i) * head_dim, head_dim);
                }
                keys = few_keys, values = few_values;
            }
            if (few_) {
                score(keys, workspace_.scores + i, in_pool(given_.k_pool, ahead));
            } else {
                pack_keys(keys, head_dim, head_dim, packed_keys, in_pool(given_.k_pool, ahead));
                std::fill(packed_keys + LANES * filled_, packed_keys + LANES * words_, 0u);
            }
            pack_values(values, head_dim, head_dim, packed_values, in_pool(given_.v_pool, ahead));
            packed_keys += LANES * words_;
            packed_values += LANES / PER_WORD<T> * head_dim;
        }
        std::fill(packed_values, workspace_.values + round_up(high, grain()) / PER_WORD<T> * head_dim, 0u);
    }

    // Computes the scores of 16 unpacked keys for few queries. `attend_rows` computes scores from packed keys instead.
    void score(const T* keys, float* scores, const T* ahead) {
        alignas(64) float sums[LANES * UNIT_FEW];
        fetch(ahead, LANES * head_dim_);
        workspace_.unit.multiply_few(keys, head_dim_ * sizeof(T), workspace_.few_queries, filled_, sums);
        turn_over(sums, rows_, scores, KEY_BLOCK);
    }

    // Subtracts the slope times the distance from a row's products first .. last - 1; key `i` has the distance `i + offset`.
    void slope_down(float* products, int64_t head, int64_t first, int64_t last, int64_t offset) const {
        // the slope is divided by the scale, because products are scaled later
        const float slope = given_.slopes[head] / given_.scale;
        Floats distance = Floats{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + float(first + offset);
        for (int64_t i = first; i < last; i += LANES, distance += float(LANES))
            store(products + i, load(products + i) + distance * slope);
    }

    // Merges the block into the result so far, or writes it to `part`. Never inlined: inlining makes decode rows 10%
    // slower.
    [[gnu::noinline]] void attend_block(int64_t block, const Partial* part) {
        const int64_t base = block * KEY_BLOCK;
        const int64_t low = std::max<int64_t>(0, tiles_.first_key(position_) - base);
        const int64_t high = std::min(KEY_BLOCK, position_ + tile_.num_tokens - base);
        const int64_t end = std::min(position_ + tile_.num_tokens, tile_.end_block * KEY_BLOCK);
        pack(block, low, high, part ? base + high : end);
        for (int64_t row = 0; row < rows_; row += CHUNK) {
            const int64_t rows = std::min(CHUNK, rows_ - row);
            Mass masses[CHUNK];
            Partial here{workspace_.part, masses};
            if (part) here = {part->sums + row * head_dim_, part->masses + row};
            attend_rows(base, row, rows, here);
            if (!part) merge_rows(row, rows, here);
        }
    }

    void attend_rows(int64_t base, int64_t row, int64_t rows, const Partial& part) {
        const int64_t first_position = position_ + row / group_, last_position = position_ + (row + rows - 1) / group_;
        const int64_t low = std::clamp<int64_t>(tiles_.first_key(first_position) - base, 0, KEY_BLOCK);
        const int64_t high = std::clamp<int64_t>(last_position + 1 - base, 0, KEY_BLOCK);
        const int64_t first = low / grain() * grain(), last = round_up(high, grain());
        if (first >= last) {
            std::fill(part.masses, part.masses + rows, Mass{NO_SCORE, 0});
            std::fill(part.sums, part.sums + rows * head_dim_, 0.0f);
            return;
        }
        const Factors scores{workspace_.queries + row * words_, words_, workspace_.keys + first * words_, LANES,
                             words_ * LANES, words_};
        if (!few_) dot_all<T>(workspace_.unit, scores, rows, (last - first) / LANES, workspace_.scores + first, KEY_BLOCK);
        constexpr int64_t weight_words = KEY_BLOCK / PER_WORD<T>;
        using Weight = std::conditional_t<PER_WORD<T> == 2, BFloat16, float>;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t position = position_ + (row + r) / group_;
            const int64_t low = std::clamp<int64_t>(tiles_.first_key(position) - base, 0, KEY_BLOCK);
            const int64_t high = std::clamp<int64_t>(position + 1 - base, 0, KEY_BLOCK);
            Weight* const weights = reinterpret_cast<Weight*>(workspace_.weights + r * weight_words);
            float* const products = workspace_.scores + r * KEY_BLOCK;
            if (given_.slopes) slope_down(products, head_of(row + r), first, last, base - position);
            part.masses[r] = given_.soft_cap ? weigh<true>(products, scoring_, low, high, first, last, weights)
                                             : weigh<false>(products, scoring_, low, high, first, last, weights);
        }
        const Factors values{workspace_.weights + first / PER_WORD<T>, weight_words,
                             workspace_.values + first / PER_WORD<T> * head_dim_, head_dim_, LANES,
                             (last - first) / PER_WORD<T>};
        dot_all<T>(workspace_.unit, values, rows, head_dim_ / LANES, part.sums, head_dim_);
    }

    void finish() {
        for (int64_t r = 0; r < rows_; r++) {
            const int64_t head = head_of(r);
            const Mass mass = all_.masses[r];
            float share = 1 / mass.total;
            if (given_.sinks) {
                const float sink = given_.sinks[head] * LOG2_E, top = std::max(mass.largest, sink);
                const float kept = power_of_two(mass.largest - top);
                share = kept / (mass.total * kept + power_of_two(sink - top));
            }
            T* out = static_cast<T*>(given_.out) + (token_of(r) * given_.num_heads + head) * head_dim_;
            for (int64_t d = 0; d < head_dim_; d += LANES)
                store(out + d, load(all_.sums + r * head_dim_ + d) * (share * given_.v_scale));
        }
    }
};

template <class T>
void attend(const void* operands, const Step& given_step, ThreadGroup& threads) {
    const auto& given = *static_cast<const AttendOperands*>(operands);
    Step step = given_step;
    if (given.page_table) step.page_table = given.page_table;
    const int64_t num_heads = given.num_kv_heads;
    thread_local SharedPrefixes shared;
    shared.find(given, step, threads.size);
    const Tiles tiles(given, step, shared, threads.size);
    Workspace workspace(tiles.max_rows(), given.head_dim, words_with_padding<T>(given.head_dim));
    int64_t mine = threads.take(), begin = 0;
    tiles.each_shared([&](const Tile& tile) {
        const int64_t parts = tile.prefix->num_parts;
        for (; mine < begin + num_heads * parts; mine = threads.take())
            TileOfHead<T>(given, step, tiles, tile, (mine - begin) / parts, workspace)
                .attend_shared((mine - begin) % parts);
        begin += num_heads * parts;
    });
    if (!shared.all().empty()) {
        threads.barrier();
        mine = threads.take(), begin = 0;
    }
    bool any_parts = false;
    tiles.each([&](const Tile& tile) {
        const bool divided = tile.parts >= 0;
        const int64_t blocks = tile.end_block - tile.first_block, shares = divided ? blocks : 1;
        any_parts |= divided;
        for (; mine < begin + num_heads * shares; mine = threads.take()) {
            TileOfHead<T> work(given, step, tiles, tile, (mine - begin) / shares, workspace);
            divided ? work.attend_part(tile.first_block + (mine - begin) % shares) : work.attend();
        }
        begin += num_heads * shares;
    });
    if (!any_parts) return;
    threads.barrier();
    mine = threads.take(), begin = 0;
    tiles.each([&](const Tile& tile) {
        if (tile.parts < 0) return;
        for (; mine < begin + num_heads; mine = threads.take())
            TileOfHead<T>(given, step, tiles, tile, mine - begin, workspace).merge_parts();
        begin += num_heads;
    });
}

}  // namespace penstock
