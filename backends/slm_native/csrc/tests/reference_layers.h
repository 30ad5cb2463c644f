// Reference layers in double precision; all tokens are one prompt.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "tests/reference_arithmetic.h"
#include "layers/layers.h"

namespace slm {

constexpr std::size_t n_all = 150;  // tokens

// Layers with float weights, the memory of the weights, and the inputs of the reference.
struct Model {
    std::size_t width, n_streams, n_heads, n_kv_heads, head_dim, n_rotated;  // heads as in the cache
    bool is_latent;
    std::deque<std::vector<float>> vectors;
    std::deque<Matrix> matrices;
    std::deque<std::vector<const Matrix*>> up;  // matrices of latents, for each head
    std::deque<MoeLayer> moe_layers;
    std::vector<Layer> layers;
    std::vector<std::size_t> caches;                     // the layer whose keys and values each layer reads
    std::vector<std::vector<float>> layer_embeddings{};  // per-layer embeddings [n_all][P], or none
    std::vector<float> cos, sin;                         // [n_all][n_rotated / 2]

    bool interleaved(std::size_t layer) const { return layer % 2 == 1; }
};

// The output of all layers for residual streams x [n_streams][n_all][width].
Wide plain_layers(const Model& model, const std::vector<float>& x);

}  // namespace slm
