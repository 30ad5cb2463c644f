#include "scan.h"

#include <algorithm>

namespace slm {

namespace {

constexpr std::size_t state_floats = 4096;  // of the heads that one task advances: they stay in the nearest cache

}  // namespace

void selective_scan(const IsaKernels& kernels, Pool& pool, const Scan& scan) {
    const std::size_t step = std::max<std::size_t>(1, state_floats / std::max<std::size_t>(1, scan.width * scan.n_state));
    const std::size_t n_blocks = (scan.n_heads + step - 1) / step;
    pool.run(scan.n_sequences * n_blocks, [&](std::size_t i) {
        const std::size_t begin = i % n_blocks * step;
        kernels.scan->heads(scan, i / n_blocks, begin, std::min(scan.n_heads, begin + step));
    });
}

}  // namespace slm
