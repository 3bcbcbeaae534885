#include "attend_expanded.h"
#include "attend_bidirectional.h"
#include "attention.h"
#include "export.h"

using namespace penstock;

KERNELS(attend, attend)
KERNELS(attend_bidirectional, attend_bidirectional)
KERNELS(attend_expanded, attend_expanded)
