// Functions for Python other than the kernels: the thread pool, and properties of the library.
//
// The library does not use headers of Python or torch, so it compiles in seconds. Python calls it through ctypes, which
// releases the GIL during a call. ops/cpp/structures.py reads the operands' fields from these headers.

#include "attend_expanded.h"
#include "attend_bidirectional.h"
#include "attention.h"
#include "experts.h"
#include "heads.h"
#include "low_rank.h"
#include "pool.h"
#include "product.h"
#include "product4.h"
#include "product8.h"
#include "recurrence.h"
#include "sampling.h"
#include "small.h"
#include "whole.h"

using namespace penstock;

extern "C" {

// Sizes of the structures that Python fills. Python reads the fields of these structures from the headers.
struct Size {
    const char* structure;
    int64_t bytes;
};
#define SIZE(structure) {#structure, sizeof(structure)}
extern const Size STRUCTURE_SIZES[];
const Size STRUCTURE_SIZES[] = {
    SIZE(Step), SIZE(GraphNode), SIZE(EmbedOperands), SIZE(NormOperands), SIZE(RotateOperands),
    SIZE(StoreOperands), SIZE(GateOperands), SIZE(AttendOperands), SIZE(PackOperands), SIZE(ProductOperands),
    SIZE(Pack8Operands), SIZE(Product8Operands), SIZE(BeginOperands), SIZE(LastOperands),
    SIZE(ChooseOperands), SIZE(RotateStoreOperands), SIZE(AddOperands), SIZE(Product4Operands),
    SIZE(Pack4Operands), SIZE(RouteOperands), SIZE(PairTable), SIZE(DispatchOperands), SIZE(ExpertsOperands),
    SIZE(CombineOperands), SIZE(AttendBidirectionalOperands), SIZE(ConvolveOperands), SIZE(RecurOperands),
    SIZE(ProductHeadsOperands), SIZE(CopyHeadsOperands), SIZE(EmbedGroupsOperands), SIZE(DrawOperands),
    SIZE(PoolRowsOperands), SIZE(AttendExpandedOperands), SIZE(AnglesOperands), SIZE(Media),
    SIZE(AddLowRankOperands), SIZE(ScoreOperands), SIZE(CopyPagesOperands),
    {nullptr, 0},
};

int64_t panel_width() { return PANEL; }
int64_t byte_step() { return UNIT_BYTES; }
int64_t max_byte_depth() { return MAX_DEPTH8; }

// Instruction sets that the kernels use, with their names in /proc/cpuinfo.
const char* instruction_set() {
    return
#if defined(__AVX512F__)
        "avx512f"
#elif defined(__AVX2__)
        "avx2"
#elif defined(__AVX__)
        "avx"
#elif defined(__x86_64__)
        "sse2"
#else
        "generic"
#endif
#if defined(__AVX512VNNI__)
        " avx512_vnni"
#endif
#if defined(__AVX512BF16__)
        " avx512_bf16"
#endif
#if defined(PENSTOCK_MATRIX_UNIT)
        " amx_bf16 amx_int8"
#endif
        ;
}

// Whether kernels use the matrix unit: they are compiled for it, and the system permits it to this process.
bool uses_matrix_unit() { return has_matrix_unit(); }

Pool* open_pool(int64_t num_threads) { return new Pool(int(num_threads)); }

void close_pool(Pool* pool) { delete pool; }

// Runs the nodes in order. Only one thread may call it at a time for a pool.
void run(Pool* pool, const GraphNode* nodes, int64_t count, const Step* step) { pool->run(nodes, count, step); }
}
