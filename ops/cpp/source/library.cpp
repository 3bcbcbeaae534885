// What Python sees beside the kernels: the threads that run them, and what it has to know of them.
//
// Nothing in the library knows of Python or torch, so it compiles in a few seconds; ops/cpp/structures.py describes the
// same operands with ctypes, which lets go of Python's lock for the whole of a call.

#include "attend_expanded.h"
#include "attend_texts.h"
#include "attention.h"
#include "experts.h"
#include "heads.h"
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

// For Python to compare with its own picture of these structures, in the same order.
extern const int64_t STRUCTURE_SIZES[];
const int64_t STRUCTURE_SIZES[] = {
    sizeof(Step),          sizeof(GraphNode),      sizeof(EmbedOperands),  sizeof(NormOperands),
    sizeof(RotateOperands), sizeof(StoreOperands), sizeof(GateOperands),   sizeof(AttendOperands),
    sizeof(PackOperands),  sizeof(ProductOperands), sizeof(Pack8Operands), sizeof(Product8Operands),
    sizeof(BeginOperands), sizeof(LastOperands),   sizeof(ChooseOperands),
    sizeof(RotateStoreOperands), sizeof(AddOperands), sizeof(Product4Operands), sizeof(Pack4Operands),
    sizeof(RouteOperands), sizeof(PairTable), sizeof(DispatchOperands), sizeof(ExpertsOperands),
    sizeof(CombineOperands), sizeof(AttendTextsOperands),
    sizeof(ConvolveOperands), sizeof(RecurOperands), sizeof(ProductHeadsOperands), sizeof(CopyHeadsOperands),
    sizeof(EmbedGroupsOperands), sizeof(DrawOperands), sizeof(PoolTextsOperands),
    sizeof(AttendExpandedOperands),
};

int64_t panel_width() { return PANEL; }
int64_t byte_step() { return UNIT_BYTES; }
int64_t max_byte_depth() { return MAX_DEPTH8; }

// What the kernels were compiled to use, in the names of /proc/cpuinfo.
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

// Whether kernels use the matrix unit: they were compiled for one, and the system has granted it to this process.
bool uses_matrix_unit() { return has_matrix_unit(); }

Pool* open_pool(int64_t num_threads) { return new Pool(int(num_threads)); }

void close_pool(Pool* pool) { delete pool; }

// For one caller at a time.
void run(Pool* pool, const GraphNode* nodes, int64_t count, const Step* step) { pool->run(nodes, count, step); }
}
