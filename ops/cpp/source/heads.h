// Products of each head with its own weight, and copies of heads (contract: ops/latent/__init__.py).
#pragma once

#include <cstring>

#include "product.h"

namespace penstock {

struct ProductHeadsOperands {
    // Product of the first head. The weights of the other heads follow in memory, each in whole panels.
    ProductOperands product;
    int64_t heads;
    int64_t x_head;           // elements of x from one head to the next
    int64_t out_stride;       // elements of `out` from one token to the next
    int64_t out_head;         // elements of `out` from one head to the next
    int64_t below;            // rows with this many tokens or more are skipped; 0: no row is skipped
};

template <class T>
void product_heads(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const ProductHeadsOperands*>(operands);
    const int64_t rows = rows_of(o.product, step), panels = (o.product.out_size + PANEL - 1) / PANEL;
    const int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    threads.share(blocks * o.heads * panels, [&](int64_t task) {
        const int64_t first = task / (o.heads * panels) * BLOCK_ROWS, head = task / panels % o.heads;
        ProductOperands own = o.product;
        own.x = static_cast<const T*>(own.x) + head * o.x_head;
        own.weight = static_cast<const T*>(own.weight) + head * panels * PANEL * own.in_size;
        T* const out = static_cast<T*>(own.out) + head * o.out_head;
        multiply_over<T>(
            own,
            [&](const auto& work) {
                each_run(step, o.below, first, std::min(first + BLOCK_ROWS, rows),
                         [&](int64_t begin, int64_t end) { work(begin, end, task % panels); });
            },
            [&](int64_t row, int64_t panel, const Floats (&sums)[2]) {
                store_sums<T, T>(sums, nullptr, out + row * o.out_stride, panel * PANEL, own.out_size);
            });
    });
}

struct CopyHeadsOperands {
    const void* x;   // [tokens, heads, size]
    void* out;
    int64_t tokens;  // 0: all tokens of the step
    int64_t heads, size;
    int64_t x_stride, x_head, out_stride, out_head;  // elements from one token, and one head, to the next
};

template <class T>
void copy_heads(const void* operands, const Step& step, ThreadGroup& threads) {
    const auto& o = *static_cast<const CopyHeadsOperands*>(operands);
    threads.share(o.tokens ? o.tokens : step.num_tokens, [&](int64_t token) {
        const T* x = static_cast<const T*>(o.x) + token * o.x_stride;
        T* out = static_cast<T*>(o.out) + token * o.out_stride;
        for (int64_t head = 0; head < o.heads; head++)
            std::memcpy(out + head * o.out_head, x + head * o.x_head, o.size * sizeof(T));
    });
}

}  // namespace penstock
