// Whole layers of a transformer, one after another without a word to Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention.h"
#include "products.h"

namespace slm {

// A matrix and what its product is shifted by.
struct Linear {
    const Matrix* matrix;
    const float* bias;  // [n_out] or null
};

// x + attention(norm(x)), then x + feed_forward(norm(x)); see PlainBlock in slm_native/kernels/parameters.py.
struct Layer {
    Norm attn_norm;
    Linear q, k, v;
    Norm q_norm, k_norm;  // of a head
    Linear output;
    Scoring scoring;
    Norm ffn_norm;
    const Matrix *gate, *up;
    Linear down;
};

// What a batch brings to a layer.
struct Place {
    const KvLayer* cache;
    Rotation rotation;
};

// Where the tokens of a batch are stored, and which of them see which.
struct Tokens {
    std::size_t n_tokens;
    const std::int64_t *pages, *slots;  // [n_tokens]
    const std::vector<Run>* runs;
};

// x [n_tokens][n_in of the first q], through all layers, in place.
void run_layers(const IsaKernels& kernels, Pool& pool, std::span<const Layer> layers, std::span<const Place> places,
                const Tokens& tokens, float* x);

}  // namespace slm
