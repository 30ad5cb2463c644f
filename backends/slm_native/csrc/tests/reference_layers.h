// Layers in plain arithmetic, in double precision and with all tokens as one prompt.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "tests/reference_arithmetic.h"
#include "layers/layers.h"

namespace slm {

constexpr std::size_t n_all = 150;  // tokens

// Layers of weights that are floats, all that they point to, and what only the plain computation reads.
struct Model {
    std::size_t width, n_streams, n_heads, n_kv_heads, head_dim, n_rotated;  // heads as the cache has them
    bool is_latent;
    std::deque<std::vector<float>> vectors;
    std::deque<Matrix> matrices;
    std::deque<std::vector<const Matrix*>> up;  // of latents, for each head
    std::deque<Mixture> mixtures;
    std::vector<Layer> layers;
    std::vector<std::size_t> caches;        // of which layer each reads keys and values
    std::vector<std::vector<float>> own{};  // each layer's own embeddings [n_all][P], or none
    std::vector<float> cos, sin;            // [n_all][n_rotated / 2]

    bool interleaved(std::size_t layer) const { return layer % 2 == 1; }
};

// What becomes of streams x [n_streams][n_all][width].
Wide plain_layers(const Model& model, const std::vector<float>& x);

}  // namespace slm
