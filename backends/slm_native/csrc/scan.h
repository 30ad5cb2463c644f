// Selective state spaces, shared among threads.
#pragma once

#include "kernels.h"
#include "pool.h"

namespace slm {

void selective_scan(const IsaKernels& kernels, Pool& pool, const Scan& scan);

}  // namespace slm
