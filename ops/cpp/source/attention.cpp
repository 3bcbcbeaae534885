#include "attend_expanded.h"
#include "attend_texts.h"
#include "attention.h"
#include "export.h"

using namespace penstock;

KERNELS(attend, attend)
KERNELS(attend_texts, attend_texts)
KERNELS(attend_expanded, attend_expanded)
