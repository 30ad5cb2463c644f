// The inputs of layers with a KV cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/attention.h"
#include "matmul/products.h"

namespace slm {

// Inputs of one layer.
struct LayerInputs {
    const KvLayer* cache;
    Rotation rotation;
    const float* embedding = nullptr;  // the per-layer embedding of the tokens [n_tokens][P]; null without one
};

// The KV slots of a batch's tokens, and their sequences.
struct Tokens {
    std::size_t n_tokens;
    const std::int64_t *pages, *slots;  // [n_tokens]
    const std::vector<Run>* runs;
};

}  // namespace slm
