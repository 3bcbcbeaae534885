// Latent attention of long rows with expanded keys and values (contract: ops/latent/__init__.py).
//
// A task computes consecutive tokens of a row for one head. It reads the row's KV cache block by block. It expands the
// latent vectors of a block into keys and values of the head. Then all tokens of the task attend to them, while they
// are in the core's cache. Therefore a task never stores more than one block, for any context length. Each block has
// its own softmax, and blocks are merged in order as in attention.h, so the split into tasks does not change any bit.
#pragma once

#include <algorithm>

#include "attention.h"
#include "heads.h"

namespace penstock {

struct AttendExpandedOperands {
    const void* q_nope;  // [T, H, N], multiplied with the expanded keys
    const void* q_pe;    // [T, H, P], multiplied with the rotated key
    int64_t q_nope_stride, q_nope_head;  // elements from one token to the next, and from one head to the next
    int64_t q_pe_stride, q_pe_head;
    const void* pool;    // [pages, 1, page, R + P], contiguous, of `type`
    const void* keys;    // [H, N, R], each head in whole panels
    const void* values;  // [H, V, R], each head in whole panels
    void* out;           // [T, H, V], contiguous
    int64_t num_heads, rank, nope_dim, rope_dim, value_dim;  // H, R, N, P, V
    float scale;
    CacheType type;
    int64_t expand_from;  // minimum tokens of a row; the kernel skips shorter rows
};

constexpr int64_t MOST_TOKENS = 4096;   // maximum tokens per task, which limits the memory for queries and sums
constexpr int64_t FEWEST_TOKENS = 512;  // minimum tokens per task, because each task expands the keys again
constexpr int64_t TASKS = 3;            // tasks per thread, if there are enough tokens

// The scratch memory of one thread.
template <class T>
struct ExpandedWorkspace {
    const int64_t key_dim, value_dim;  // sizes of a head, padded to whole vectors
    const int64_t width;               // size of a token in the cache
    const int64_t filled, words;       // words of a query or key in a product, without and with padding
    uint32_t* queries;                 // [tokens, words]
    float* out;                        // [tokens, value_dim]
    Mass* masses;                      // [tokens]
    T* latents;                        // [KEY_BLOCK, width]
    T* keys;                           // [KEY_BLOCK, key_dim]
    T* values;                         // [KEY_BLOCK, value_dim]
    uint32_t* packed_keys;             // [KEY_BLOCK / 16, words, 16]
    uint32_t* packed_values;           // [KEY_BLOCK words, value_dim]
    uint32_t* weights;                 // [CHUNK, KEY_BLOCK words]
    float* scores;                     // [CHUNK, KEY_BLOCK]
    float* part;                       // [CHUNK, value_dim]

    ExpandedWorkspace(const AttendExpandedOperands& o, int64_t tokens)
        : key_dim(round_up(o.nope_dim + o.rope_dim, LANES)), value_dim(round_up(o.value_dim, LANES)),
          width(o.rank + o.rope_dim), filled(key_dim / PER_WORD<T>), words(words_with_padding<T>(key_dim)) {
        const int64_t padded = round_up(tokens, LANES);
        Places places;
        places.add(queries, padded * words), places.add(out, padded * value_dim), places.add(masses, padded);
        places.add(latents, KEY_BLOCK * width), places.add(keys, KEY_BLOCK * key_dim);
        places.add(values, KEY_BLOCK * value_dim), places.add(packed_keys, KEY_BLOCK * words);
        places.add(packed_values, KEY_BLOCK * value_dim), places.add(weights, CHUNK * KEY_BLOCK);
        places.add(scores, CHUNK * KEY_BLOCK), places.add(part, CHUNK * value_dim);
        places.fill_in();
    }

private:
    // Pointers into a thread's memory, each at the start of a cache line.
    struct Places {
        void** pointers[11];
        int64_t offsets[11];
        int64_t count = 0, size = 0;

        template <class Number>
        void add(Number*& pointer, int64_t numbers) {
            pointers[count] = reinterpret_cast<void**>(&pointer), offsets[count++] = size;
            size += round_up(numbers * int64_t(sizeof(Number)), 64);
        }

        void fill_in() {
            char* const memory = reinterpret_cast<char*>(Workspace::space(size / int64_t(sizeof(uint32_t))));
            for (int64_t i = 0; i < count; i++) *pointers[i] = memory + offsets[i];
        }
    };
};

// Attention of one head for `num_tokens` tokens of a row, starting at its token `first`.
template <class T>
class ExpandedTile {
public:
    ExpandedTile(const AttendExpandedOperands& given, const Step& step, int64_t row, int64_t first, int64_t num_tokens,
                 int64_t head, ExpandedWorkspace<T>& workspace)
        : given_(given), step_(step), row_(row), token_(step.query_starts[row] + first),
          position_(step.starts[row] + first), tokens_(num_tokens), head_(head), workspace_(workspace),
          scoring_{given.scale * LOG2_E, 0, 0} {}

    void attend() {
        gather_queries();
        const int64_t end = position_ + tokens_;
        for (int64_t base = 0; base < end; base += KEY_BLOCK) {
            const int64_t count = std::min(KEY_BLOCK, end - base);
            gather_latents(base, count);
            expand<T>(given_.keys, given_.nope_dim, count, workspace_.keys, workspace_.key_dim);
            expand<T>(given_.values, given_.value_dim, count, workspace_.values, workspace_.value_dim);
            pack(count);
            attend_block(base);
        }
        finish();
    }

private:
    const AttendExpandedOperands& given_;
    const Step& step_;
    const int64_t row_, token_, position_, tokens_, head_;
    ExpandedWorkspace<T>& workspace_;
    const Scoring scoring_;

    static int64_t grain() { return std::max<int64_t>(LANES, PER_WORD<T> * step_grain<T>()); }

    void gather_queries() {
        const T* q_nope =
            static_cast<const T*>(given_.q_nope) + token_ * given_.q_nope_stride + head_ * given_.q_nope_head;
        const T* q_pe = static_cast<const T*>(given_.q_pe) + token_ * given_.q_pe_stride + head_ * given_.q_pe_head;
        T* const query = workspace_.keys;  // the memory for keys is still unused
        std::memset(query, 0, workspace_.key_dim * sizeof(T));
        for (int64_t i = 0; i < tokens_; i++, q_nope += given_.q_nope_stride, q_pe += given_.q_pe_stride) {
            std::memcpy(query, q_nope, given_.nope_dim * sizeof(T));
            std::memcpy(query + given_.nope_dim, q_pe, given_.rope_dim * sizeof(T));
            uint32_t* const words = workspace_.queries + i * workspace_.words;
            for (int64_t w = 0; w < workspace_.filled; w += 8) {
                const Eight x = words_of(query + w * PER_WORD<T>);
                std::memcpy(words + w, &x, sizeof(x));
            }
            std::fill(words + workspace_.filled, words + workspace_.words, 0u);
        }
    }

    // Read positions base .. base + count - 1 of the cache; the rotated keys go to the end of the keys.
    void gather_latents(int64_t base, int64_t count) {
        const int32_t* const pages = step_.page_table + row_ * step_.table_width;
        const int64_t begin = given_.nope_dim, end = begin + given_.rope_dim, key_dim = workspace_.key_dim;
        for (int64_t i = 0; i < count; i++) {
            const int64_t page = pages[(base + i) / step_.page_size];
            const int64_t slot = page * step_.page_size + (base + i) % step_.page_size;
            T *const latent = workspace_.latents + i * workspace_.width, *const key = workspace_.keys + i * key_dim;
            read_cached(given_.type, given_.pool, slot * workspace_.width, latent, workspace_.width);
            std::memcpy(key + begin, latent + given_.rank, given_.rope_dim * sizeof(T));
            std::fill(key + end, key + key_dim, T{});
        }
    }

    // out [count, size] = latents . this head's weight [size, R]; lines of `out` are `stride` elements apart
    template <class Out>
    void expand(const void* weight, int64_t size, int64_t count, Out* out, int64_t stride) {
        const int64_t panels = (size + PANEL - 1) / PANEL;
        const ProductOperands product{
            .x = workspace_.latents,
            .x_stride = workspace_.width,
            .rows = count,
            .weight = static_cast<const T*>(weight) + head_ * panels * PANEL * given_.rank,
            .bias = nullptr,
            .out = nullptr,
            .in_size = given_.rank,
            .out_size = size,
            .activation = 0,
        };
        multiply_over<T>(
            product,
            [&](const auto& work) {
                for (int64_t panel = 0; panel < panels; panel++) work(0, count, panel);
            },
            [&](int64_t row, int64_t panel, const Floats (&sums)[2]) {
                store_sums<T, T>(sums, nullptr, out + row * stride, panel * PANEL, size);
            });
    }

    // Pack keys and values for products, padded with zeros to a whole grain.
    void pack(int64_t count) {
        const int64_t end = round_up(count, grain()), key_dim = workspace_.key_dim, value_dim = workspace_.value_dim;
        std::memset(workspace_.keys + count * key_dim, 0, (end - count) * key_dim * sizeof(T));
        std::memset(workspace_.values + count * value_dim, 0, (end - count) * value_dim * sizeof(T));
        T* value = workspace_.values;
        for (int64_t i = 0; i < count; i++, value += value_dim)
            std::fill(value + given_.value_dim, value + value_dim, T{});
        for (int64_t i = 0; i < end; i += LANES) {
            uint32_t* const packed = workspace_.packed_keys + i * workspace_.words;
            pack_keys<T>(workspace_.keys + i * key_dim, key_dim, key_dim, packed, nullptr);
            std::fill(packed + LANES * workspace_.filled, packed + LANES * workspace_.words, 0u);
            pack_values<T>(workspace_.values + i * value_dim, value_dim, value_dim,
                           workspace_.packed_values + i / PER_WORD<T> * value_dim, nullptr);
        }
    }

    // All tokens attend to the block of keys that starts at `base`.
    void attend_block(int64_t base) {
        MatrixUnit unit;  // a new unit, because the products above have restored the previous state
        const int64_t value_dim = workspace_.value_dim;
        // earlier tokens see no key of this block
        const int64_t first = std::max<int64_t>(0, base - position_) / CHUNK * CHUNK;
        for (int64_t token = first; token < tokens_; token += CHUNK) {
            const int64_t count = std::min(CHUNK, tokens_ - token);
            float *const sums = workspace_.out + token * value_dim, *const part = workspace_.part;
            Mass* const masses = workspace_.masses + token;
            Mass later[CHUNK];
            attend_chunk(unit, base, token, count, base ? part : sums, base ? later : masses);
            for (int64_t i = 0; base && i < count; i++)
                merge(sums + i * value_dim, masses[i], part + i * value_dim, later[i], value_dim);
        }
    }

    // Writes the attention of up to CHUNK tokens to this block of keys to `sums` and `masses`.
    void attend_chunk(MatrixUnit& unit, int64_t base, int64_t token, int64_t count, float* sums, Mass* masses) {
        const int64_t own = position_ + token - base;
        const auto seen = [&](int64_t i) { return std::clamp<int64_t>(own + i + 1, 0, KEY_BLOCK); };
        const int64_t last = round_up(seen(count - 1), grain());
        const int64_t words = workspace_.words, value_dim = workspace_.value_dim;
        const uint32_t* const queries = workspace_.queries + token * words;
        float* const scores = workspace_.scores;
        const Factors products{queries, words, workspace_.packed_keys, LANES, words * LANES, words};
        dot_all<T>(unit, products, count, last / LANES, scores, KEY_BLOCK);
        constexpr int64_t weight_words = KEY_BLOCK / PER_WORD<T>;
        constexpr bool SHORT = sizeof(T) == sizeof(BFloat16);
        using Weight = std::conditional_t<PER_WORD<T> == 2, BFloat16, float>;
        for (int64_t i = 0; i < count; i++)
            masses[i].largest = top_score<false>(scores + i * KEY_BLOCK, scoring_, 0, seen(i));
        for (int64_t i = 0; i < count; i++) {
            Weight* const weights = reinterpret_cast<Weight*>(workspace_.weights + i * weight_words);
            const float* const scored = scores + i * KEY_BLOCK;
            masses[i].total =
                weigh_below<false, SHORT>(masses[i].largest, scored, scoring_, 0, seen(i), 0, last, weights);
        }
        const Factors mixed{workspace_.weights, weight_words, workspace_.packed_values, value_dim, LANES,
                            last / PER_WORD<T>};
        dot_all<T>(unit, mixed, count, value_dim / LANES, sums, value_dim);
    }

    void finish() {
        for (int64_t i = 0; i < tokens_; i++) {
            const float share = 1 / workspace_.masses[i].total;
            T* const out = static_cast<T*>(given_.out) + ((token_ + i) * given_.num_heads + head_) * given_.value_dim;
            for (int64_t d = 0; d < given_.value_dim; d += LANES)
                store(out + d, load(workspace_.out + i * workspace_.value_dim + d) * share,
                      std::min<int64_t>(LANES, given_.value_dim - d));
        }
    }
};

// Returns the number of tokens per task, for a row of `count` tokens in a step that expands `rows` rows.
inline int64_t tokens_of_task(int64_t count, int64_t num_heads, int64_t rows, int64_t num_threads) {
    const int64_t wanted = (TASKS * num_threads + num_heads * rows - 1) / (num_heads * rows);
    const int64_t parts = std::max((count + MOST_TOKENS - 1) / MOST_TOKENS,
                                   std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, count / FEWEST_TOKENS)));
    return (count + parts - 1) / parts;
}

template <class T>
void attend_expanded(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& given = *static_cast<const AttendExpandedOperands*>(operands);
    int64_t rows = 0, most = 0;
    for (int64_t row = 0; row < step.num_rows; row++) rows += step.counts[row] >= given.expand_from;
    if (!rows) return;
    const auto tokens_of = [&](int64_t count) { return tokens_of_task(count, given.num_heads, rows, threads.size); };
    for (int64_t row = 0; row < step.num_rows; row++)
        if (step.counts[row] >= given.expand_from) most = std::max(most, tokens_of(step.counts[row]));
    ExpandedWorkspace<T> workspace(given, most);
    int64_t mine = threads.take(), begin = 0;
    for (int64_t row = 0; row < step.num_rows; row++) {
        const int64_t count = step.counts[row];
        if (count < given.expand_from) continue;
        const int64_t tokens = tokens_of(count);
        // Tasks start at the row's end, where they are most expensive.
        for (int64_t first = (count - 1) / tokens * tokens; first >= 0; first -= tokens, begin += given.num_heads)
            for (; mine < begin + given.num_heads; mine = threads.take())
                ExpandedTile<T>(given, step, row, first, std::min(tokens, count - first), mine - begin, workspace)
                    .attend();
    }
}

}  // namespace penstock
