// Selective state spaces: what crosses between sharing them among threads and computing them. Plain data and declarations
// only: included by all instruction sets.
#pragma once

#include <cstddef>

namespace slm {

// See KernelSet.selective_scan in slm_native/kernels/kernelset.py. `state` [B][H][P][N] is advanced in place.
struct Scan {
    std::size_t n_sequences, n_tokens, n_heads, width, n_groups, n_state, n_rates;
    const float *x, *steps, *a, *b, *c;
    float *state, *y;
};

struct ScanKernels {
    // Heads from begin to end of a sequence, all of its tokens.
    void (*heads)(const Scan& scan, std::size_t sequence, std::size_t begin, std::size_t end);
};

}  // namespace slm
