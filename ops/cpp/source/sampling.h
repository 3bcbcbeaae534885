// Choice of tokens from logits, with masks of the tokens that a grammar allows, and log-probabilities (contract:
// ops/sampling/__init__.py).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"
#include "step.h"

namespace penstock {

constexpr float NEVER = -std::numeric_limits<float>::infinity();

constexpr int BITS = 32;  // bits per word of a mask

// Forbids the tokens among the first `count` logits whose bit in the word is 0.
inline void forbid(float* logits, uint32_t word, int count) {
    if (word == ~uint32_t{}) return;
    if (count == BITS) {  // a loop that the compiler vectorises
        for (int i = 0; i < BITS; i++) logits[i] = word >> i & 1 ? logits[i] : NEVER;
        return;
    }
    for (int i = 0; i < count; i++)
        if (!(word >> i & 1)) logits[i] = NEVER;
}

// Forbids the tokens of a whole row whose bit in the mask is 0.
inline void forbid(float* logits, const uint32_t* mask, int64_t size) {
    for (int64_t first = 0; first < size; first += BITS)
        forbid(logits + first, mask[first / BITS], int(std::min<int64_t>(BITS, size - first)));
}

struct DrawOperands {
    float* logits;             // [R, V]; logits of forbidden tokens are overwritten
    const bool* greedy;        // [R]
    const float* temperature;  // [R]
    const float* min_p;        // [R]
    const float* uniform;      // [R]
    int64_t* ids;              // [R]
    bool* sound;               // [R]
    const int64_t* mask_of;    // [R], index into `masks`, or -1 for rows without a mask; null: no row has a mask
    const uint32_t* masks;     // [Q, words]
    int64_t words;             // words per mask, at least V / 32
    int64_t rows;              // R
    int64_t vocab_size;        // V
};

constexpr int64_t WEIGHTS = 256;    // tokens weighed in one call
constexpr int64_t MAX_PARTS = 512;  // maximum number of parts of a vocabulary whose masses are stored

typedef int64_t Longs __attribute__((vector_size(64)));
typedef float HalfFloats __attribute__((vector_size(32)));

// Returns the largest logit of a row, or NaN if any logit is NaN.
inline float peak_of(const float* logits, int64_t size) {
    Floats best[4] = {fill(NEVER), fill(NEVER), fill(NEVER), fill(NEVER)};
    Ints broken{};
    int64_t k = 0;
    for (; k + 4 * LANES <= size; k += 4 * LANES)
        for (int i = 0; i < 4; i++) {
            const Floats x = load(logits + k + i * LANES);
            broken |= x != x;
            best[i] = larger(x, best[i]);
        }
    float found = largest(larger(larger(best[0], best[1]), larger(best[2], best[3])));
    bool is_broken = false;
    for (int lane = 0; lane < LANES; lane++) is_broken |= broken[lane] != 0;
    for (; k < size; k++) {
        is_broken |= std::isnan(logits[k]);
        found = std::max(found, logits[k]);
    }
    return is_broken ? std::numeric_limits<float>::quiet_NaN() : found;
}

// Returns the index of the first logit that equals `peak`.
inline int64_t index_of(float peak, const float* logits, int64_t size) {
    int64_t first = 0;
    for (bool found = false; first + 64 <= size; first += 64) {
        for (int i = 0; i < 64; i++) found |= logits[first + i] == peak;
        if (found) break;
    }
    while (logits[first] != peak) first++;
    return first;
}

// Parameters that convert a row's logits to weights.
struct Weighing {
    float peak;
    float scale;  // log2(e) / temperature
    float least;  // min_p: smaller weights become 0
    float one;    // fixed-point representation of 1
};

inline void to_fixed(Floats weights, const Weighing& how, int64_t* to) {
    const Floats scaled = where_less(weights, fill(how.least), Floats{}, weights) * how.one;
    HalfFloats halves[2];
    std::memcpy(halves, &scaled, sizeof(scaled));
    for (int i = 0; i < 2; i++) {
#if defined(__AVX512DQ__)
        const Longs fixed = cast<Longs>(_mm512_cvttps_epi64(cast<__m256>(halves[i])));
#else
        const Longs fixed = __builtin_convertvector(halves[i], Longs);
#endif
        std::memcpy(to + i * LANES / 2, &fixed, sizeof(fixed));
    }
}

// Computes the weights of up to WEIGHTS tokens and returns their sum. It is never inlined, because it is called twice
// for some blocks, and both calls must return the same bits.
[[gnu::noinline]] inline int64_t weigh(const float* logits, int64_t size, const Weighing& how, int64_t* to) {
    int64_t k = 0;
    for (; k + 4 * LANES <= size; k += 4 * LANES) {
        Floats x[4];
        for (int i = 0; i < 4; i++) x[i] = (load(logits + k + i * LANES) - how.peak) * how.scale;
        powers_of_two<false>(x);
        for (int i = 0; i < 4; i++) to_fixed(x[i], how, to + k + i * LANES);
    }
    for (; k < size; k += LANES)
        to_fixed(power_of_two((load(logits + k, std::min<int64_t>(LANES, size - k)) - how.peak) * how.scale), how, to + k);
    int64_t total = 0;
    for (int64_t i = 0; i < size; i++) total += to[i];
    return total;
}

// Returns whether there is a mask that forbids all of these tokens, so that their weights are 0.
inline bool allows_none(const uint32_t* mask, int64_t first, int64_t count) {
    if (mask == nullptr) return false;
    uint32_t any = 0;
    for (int64_t word = first / BITS; word * BITS < first + count; word++) any |= mask[word];
    return any == 0;
}

// Returns the first token at which the cumulative mass exceeds the uniform number's share of the total mass.
inline int64_t draw_one(
    const float* logits, const uint32_t* mask, int64_t size, const Weighing& how, float uniform) {
    int64_t weights[WEIGHTS + LANES], masses[MAX_PARTS] = {};
    const int64_t blocks = (size + WEIGHTS - 1) / WEIGHTS;
    const int64_t part = (blocks + MAX_PARTS - 1) / MAX_PARTS * WEIGHTS;  // tokens per part
    int64_t mass = 0;
    for (int64_t first = 0; first < size; first += WEIGHTS) {
        const int64_t count = std::min(WEIGHTS, size - first);
        if (allows_none(mask, first, count)) continue;
        const int64_t sum = weigh(logits + first, count, how, weights);
        masses[first / part] += sum;
        mass += sum;
    }
    // `uniform` has steps of 2^-24. Half a step is added, so that it never lies exactly between two tokens.
    const int64_t share = std::min(int64_t((double(uniform) + 0x1p-25) * double(mass)), mass - 1);
    int64_t before = 0, first = 0;
    for (const int64_t* sum = masses; before + *sum <= share; first += part) before += *sum++;
    while (true) {
        const int64_t count = std::min(WEIGHTS, size - first);
        const int64_t sum = allows_none(mask, first, count) ? 0 : weigh(logits + first, count, how, weights);
        if (before + sum > share) break;
        before += sum;
        first += count;
    }
    const int64_t* weight = weights;
    for (; before + *weight <= share; weight++) before += *weight;
    return first + (weight - weights);
}

template <class T>
void draw(const void* operands, const Step&, ThreadGroup& threads) {
    const auto& o = *static_cast<const DrawOperands*>(operands);
    int bits = 0;
    while ((int64_t{1} << bits) < o.vocab_size) bits++;
    const float one = std::ldexp(1.0f, 62 - bits);
    threads.share(o.rows, [&](int64_t row) {
        float* logits = o.logits + row * o.vocab_size;
        const uint32_t* mask = nullptr;
        if (o.mask_of != nullptr && o.mask_of[row] >= 0) {
            mask = o.masks + o.mask_of[row] * o.words;
            forbid(logits, mask, o.vocab_size);
        }
        const float peak = peak_of(logits, o.vocab_size);
        o.sound[row] = std::isfinite(peak);
        o.ids[row] = 0;
        if (!o.sound[row]) return;
        if (o.greedy[row]) {
            o.ids[row] = index_of(peak, logits, o.vocab_size);
            return;
        }
        const double scale = std::min(1.4426950408889634 / double(o.temperature[row]), 1e30);
        o.ids[row] = draw_one(logits, mask, o.vocab_size, {peak, float(scale), o.min_p[row], one}, o.uniform[row]);
    });
}

struct ScoreOperands {
    const float* logits;           // [R, V]
    const float* temperature;      // [R]
    const int64_t* chosen_ids;     // [R]
    const int64_t* requested_ids;  // [R, M]
    float* chosen;                 // [R], log-probabilities
    float* top;                    // [R, N]
    int64_t* top_ids;              // [R, N]
    float* requested;              // [R, M]
    int64_t rows;                  // R
    int64_t vocab_size;            // V
    int64_t num_top;               // N, at most V and at most MAX_TOP
    int64_t num_requested;         // M
};

constexpr int64_t MAX_TOP = 128;

// Finds the `count` largest logits of a row in descending order. Equal logits are ordered by id.
inline void best_of(const float* logits, int64_t size, int64_t count, float* values, int64_t* ids) {
    int64_t found = 0;
    const auto insert = [&](float value, int64_t id) {
        int64_t place = found < count ? found++ : count - 1;
        for (; place > 0 && values[place - 1] < value; place--) {
            values[place] = values[place - 1];
            ids[place] = ids[place - 1];
        }
        values[place] = value;
        ids[place] = id;
    };
    int64_t k = 0;
    for (; k < count; k++) insert(logits[k], k);
    if (count == 0) return;
    constexpr int64_t BLOCK = 64;
    for (; k + BLOCK <= size; k += BLOCK) {
        bool any = false;
        for (int64_t i = 0; i < BLOCK; i++) any |= logits[k + i] > values[count - 1];
        if (!any) continue;
        for (int64_t i = k; i < k + BLOCK; i++)
            if (logits[i] > values[count - 1]) insert(logits[i], i);
    }
    for (; k < size; k++)
        if (logits[k] > values[count - 1]) insert(logits[k], k);
}

template <class T>
void score(const void* operands, const Step&, ThreadGroup& threads) {
    const auto& o = *static_cast<const ScoreOperands*>(operands);
    int bits = 0;
    while ((int64_t{1} << bits) < o.vocab_size) bits++;
    const float one = std::ldexp(1.0f, 62 - bits);
    threads.share(o.rows, [&](int64_t row) {
        const float* logits = o.logits + row * o.vocab_size;
        const double temperature = o.temperature[row];
        const float peak = peak_of(logits, o.vocab_size);
        const double scale = std::min(1.4426950408889634 / temperature, 1e30);
        double log_mass = std::numeric_limits<double>::quiet_NaN();  // stays NaN if the row's largest logit is not finite
        if (std::isfinite(peak)) {
            int64_t weights[WEIGHTS + LANES], mass = 0;
            for (int64_t first = 0; first < o.vocab_size; first += WEIGHTS)
                mass += weigh(
                    logits + first, std::min(WEIGHTS, o.vocab_size - first), {peak, float(scale), 0.0f, one}, weights);
            log_mass = std::log(std::ldexp(double(mass), bits - 62));
        }
        const auto log_softmax = [&](float logit) {
            return float((double(logit) - double(peak)) / temperature - log_mass);
        };
        o.chosen[row] = log_softmax(logits[o.chosen_ids[row]]);
        for (int64_t i = row * o.num_requested; i < (row + 1) * o.num_requested; i++)
            o.requested[i] = log_softmax(logits[o.requested_ids[i]]);
        float* top = o.top + row * o.num_top;
        best_of(logits, o.vocab_size, o.num_top, top, o.top_ids + row * o.num_top);
        for (int64_t i = 0; i < o.num_top; i++) top[i] = log_softmax(top[i]);
    });
}

}  // namespace penstock
