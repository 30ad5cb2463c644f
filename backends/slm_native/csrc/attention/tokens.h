// What a batch brings to layers that attend to a cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/attention.h"
#include "matmul/products.h"

namespace slm {

// To one layer.
struct Place {
    const KvLayer* cache;
    Rotation rotation;
    const float* own = nullptr;  // the layer's own embedding of the tokens [n_tokens][P]; null where it has none
};

// Where the tokens of a batch are stored, and which of them see which.
struct Tokens {
    std::size_t n_tokens;
    const std::int64_t *pages, *slots;  // [n_tokens]
    const std::vector<Run>* runs;
};

}  // namespace slm
