// Multi-head latent attention (MLA): all heads share one latent of each token; see slm_native/steps/attention.py.
//
// Shapes: H heads, R rotated values of a query, N values without rotation, C width of the latent, U of a head's result,
// Q of compressed queries.
#pragma once

#include <cstddef>
#include <span>

#include "attention/tokens.h"

namespace slm {

// A null matrix or null weights: the layer lacks this part.
struct Latent {
    Linear q_down;                              // (Q, E)
    Norm q_norm;                                // [Q]
    Linear q;                                   // (H*(N+R), E) or (H*(N+R), Q)
    Linear kv_down;                             // (C+R, E)
    Norm kv_norm;                               // [C]
    std::span<const Matrix* const> k_up, v_up;  // [H] of (C, N), and of (U, C)
};

// mixed [n_tokens][H*U] = attention of x [n_tokens][E], which is normalized first. Stores the latents, behind their
// rotated parts, in the cache. Expands values, or keys and values, from latents for each head if that costs less than
// attending to latents.
void attend_to_latents(const IsaKernels& kernels, Pool& pool, const Latent& layer, const Norm& norm,
                       const Scoring& scoring, const LayerInputs& place, const Tokens& tokens, const float* x,
                       float* mixed);

}  // namespace slm
