// What lies around layers: several residual streams, and embeddings of a layer's own; see slm_native/streams.py.
//
// Shapes: T tokens, E embedding width, N streams, P width of a layer's own embedding.
#pragma once

#include <cstddef>

#include "matmul/products.h"

namespace slm {

// How a layer lets its own embedding of a token in. Without `gate`, it has none.
struct LayerEmbedding {
    Linear gate, project;  // (P, E), (E, P)
    Norm norm;             // [E]
    Activation activation;
};

// Alternating updates. Without `router`, there is one stream.
struct AltUp {
    Linear router, predict, correct;  // (N, E), (N*N, N), (N, N)
    Norm router_norm;                 // [E], divided by E
    const float* scale;               // [E], of the layer's stream before its own embedding is let in
    std::size_t active;               // which stream the layer runs on
};

// Streams [N], so many numbers apart, of [T][E] each. What is let into all but the first waits for the next pass over them.
struct Streams {
    float* at;
    std::size_t n, stride, n_tokens, width;
    float* waiting = nullptr;  // [T][E], or nothing
    Norm waiting_norm{};       // of it
    float* operator[](std::size_t i) const { return at + i * stride; }
};

// The streams as they are expected behind the layer: each, and a mixture of all that the active one chooses.
void predict(const IsaKernels& kernels, Pool& pool, const AltUp& altup, Streams& streams);

// The streams behind the layer: corrected by what it made [T][E] beyond what was expected, and its own embedding [T][P]
// of the tokens let into all but the first, when they are settled or predicted.
void correct(const IsaKernels& kernels, Pool& pool, const AltUp& altup, const LayerEmbedding& embedding,
             const float* own, const float* made, Streams& streams);

// What waits is added.
void settle(const IsaKernels& kernels, Pool& pool, Streams& streams);

// y [n_parts][T][P] = shares[0] * (rows `made` [T][n_parts][P], normalized) + shares[1] * (rows `given`, likewise).
void part_embeddings(const IsaKernels& kernels, Pool& pool, const float* made, const float* given, const Norm& norm,
                     const float (&shares)[2], std::size_t n_tokens, std::size_t n_parts, float* y);

// x [T][E] += what the layer lets in of its own embedding [T][P].
void let_in(const IsaKernels& kernels, Pool& pool, const LayerEmbedding& embedding, const float* own,
            std::size_t n_tokens, float* x);

}  // namespace slm
