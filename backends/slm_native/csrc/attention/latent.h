// Multi-head latent attention (MLA): all heads share one latent per token; see slm_native/steps/attention.py.
//
// Shapes: H heads; widths: R rotated part of a query, N its other part, C latent, U a head's output, Q compressed
// queries.
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

// mixed [n_tokens][H*U] = attention of x [n_tokens][E], after its norm. Writes latents, after their rotated part, to
// the cache. Expands values, or keys and values, from latents for each head if that costs less than attending to
// latents.
void attend_to_latents(const IsaKernels& kernels, Pool& pool, const Latent& layer, const Norm& norm,
                       const Scoring& scoring, const LayerInputs& inputs, const Tokens& tokens, const float* x,
                       float* mixed);

}  // namespace slm
