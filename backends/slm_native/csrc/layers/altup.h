// AltUp (alternating updates) with several residual streams, and per-layer embeddings; see slm_native/steps/altup.py.
//
// Shapes: T tokens, E embedding width, N residual streams, P width of a per-layer embedding.
#pragma once

#include <cstddef>

#include "matmul/products.h"

namespace slm {

// The weights that add a per-layer embedding; without `gate`, the layer has none.
struct LayerEmbedding {
    Linear gate, project;  // (P, E), (E, P)
    Norm norm;             // [E]
    Activation activation;
};

// Alternating updates (https://arxiv.org/abs/2301.13310). Without `router`, there is one residual stream.
struct AltUp {
    Linear router, predict, correct;  // (N, E), (N*N, N), (N, N)
    Norm router_norm;                 // [E], divided by E
    const float* scale;               // [E], applied to the active stream before the per-layer embedding is added
    std::size_t active;               // index of the stream on which the layer runs
};

// N residual streams of [T][E], `stride` numbers apart. The per-layer embedding is added to all streams but the first
// in the next pass over them; until then it is `pending`.
struct ResidualStreams {
    float* at;
    std::size_t n, stride, n_tokens, width;
    float* pending = nullptr;  // [T][E] or null
    Norm pending_norm{};       // of `pending`
    float* operator[](std::size_t i) const { return at + i * stride; }
};

// AltUp predict: adds to each stream a combination of all streams; the active stream determines the coefficients.
void predict(const IsaKernels& kernels, Pool& pool, const AltUp& altup, ResidualStreams& streams);

// AltUp correct: adds to each stream a share of the innovation, which is the layer's output [T][E] minus the predicted
// active stream. The per-layer embedding [T][P] becomes pending.
void correct(const IsaKernels& kernels, Pool& pool, const AltUp& altup, const LayerEmbedding& embedding,
             const float* layer_inputs, const float* layer_output, ResidualStreams& streams);

// Adds the pending per-layer embedding, if any.
void apply_pending(const IsaKernels& kernels, Pool& pool, ResidualStreams& streams);

// y [n_parts][T][P] = shares[0] * normalize(projected [T][n_parts][P]) + shares[1] * looked_up [T][n_parts][P].
void split_layer_embeddings(const IsaKernels& kernels, Pool& pool, const float* projected, const float* looked_up,
                            const Norm& norm, const float (&shares)[2], std::size_t n_tokens, std::size_t n_parts,
                            float* y);

// x [T][E] += the gated projection of the per-layer embedding [T][P].
void add_layer_embedding(const IsaKernels& kernels, Pool& pool, const LayerEmbedding& embedding,
                         const float* layer_inputs, std::size_t n_tokens, float* x);

}  // namespace slm
