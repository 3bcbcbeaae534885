#include "attention.h"
#include "export.h"

using namespace penstock;

KERNELS(attend, attend)
