// What Python sees: one function for each kernel and type, and the one that runs them.
//
// Nothing here knows of Python or torch, so it compiles in a few seconds; ops/cpp/library.py describes the same
// operands with ctypes, which lets go of Python's lock for the whole of a call.

#include "attention.h"
#include "pool.h"
#include "product.h"
#include "product8.h"
#include "small.h"
#include "whole.h"

using namespace penstock;

#define KERNEL(name, ...) \
    void name(const void* operands, const Step& step, Team& team) { __VA_ARGS__(operands, step, team); }
#define KERNELS(name, kernel)                \
    KERNEL(name##_float32, kernel<float>)    \
    KERNEL(name##_bfloat16, kernel<BFloat16>)

template <class T>
constexpr auto product_alike = product<T, T>;
template <class T>
constexpr auto product_wide = product<T, float>;
template <class T>
constexpr auto product8_alike = product8<T, T>;
template <class T>
constexpr auto product8_wide = product8<T, float>;

template <class T>
constexpr auto choose_plain = choose<T, false>;
template <class T>
constexpr auto choose_rounded = choose<T, true>;

extern "C" {

KERNEL(begin_float32, begin)
KERNEL(begin_bfloat16, begin)
KERNELS(last, last)
KERNELS(choose, choose_plain)
KERNELS(choose8, choose_rounded)

KERNELS(embed, embed)
KERNELS(norm, norm)
KERNELS(rotate, rotate)
KERNELS(store, store_kv)
KERNELS(rotate_store, rotate_store)
KERNELS(gate, gate)
KERNELS(attend, attend)
KERNELS(pack, pack)
KERNELS(product, product_alike)
KERNELS(product_wide, product_wide)
KERNELS(pack8, pack8)
KERNELS(product8, product8_alike)
KERNELS(product8_wide, product8_wide)

// For Python to compare with its own picture of these structures, in the same order.
extern const int64_t STRUCTURE_SIZES[];
const int64_t STRUCTURE_SIZES[] = {
    sizeof(Step),          sizeof(Node),           sizeof(EmbedOperands),  sizeof(NormOperands),
    sizeof(RotateOperands), sizeof(StoreOperands), sizeof(GateOperands),   sizeof(AttendOperands),
    sizeof(PackOperands),  sizeof(ProductOperands), sizeof(Pack8Operands), sizeof(Product8Operands),
    sizeof(BeginOperands), sizeof(LastOperands),   sizeof(ChooseOperands),
    sizeof(RotateStoreOperands),
};

int64_t panel_width() { return PANEL; }
int64_t byte_step() { return UNIT_BYTES; }
int64_t max_byte_depth() { return MAX_DEPTH8; }

Pool* open_pool(int64_t num_threads) { return new Pool(int(num_threads)); }

void close_pool(Pool* pool) { delete pool; }

// For one caller at a time.
void run(Pool* pool, const Node* nodes, int64_t count, const Step* step) { pool->run(nodes, count, step); }
}
