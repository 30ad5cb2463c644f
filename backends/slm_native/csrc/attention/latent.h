// Attention to a latent of each token, which all heads have in common; see slm_native/latent.py.
//
// Shapes: H heads, R rotated values of a query, N values that are not, C width of the latent, U of a head's result, Q of
// compressed queries.
#pragma once

#include <cstddef>
#include <span>

#include "attention/tokens.h"

namespace slm {

// What has no matrix or no weights is not there.
struct Latent {
    Linear q_down;                              // (Q, E)
    Norm q_norm;                                // [Q]
    Linear q;                                   // (H*(N+R), E) or (H*(N+R), Q)
    Linear kv_down;                             // (C+R, E)
    Norm kv_norm;                               // [C]
    std::span<const Matrix* const> k_up, v_up;  // [H] of (C, N), and of (U, C)
};

// Many queries meet values, or keys, too, that are made of the latents for each head, where that is less work than to
// score and mix latents.
// mixed [n_tokens][H*U] of x [n_tokens][E], normalized first; latents, rotated parts before them, go into the cache.
void attend_to_latents(const IsaKernels& kernels, Pool& pool, const Latent& layer, const Norm& norm,
                       const Scoring& scoring, const Place& place, const Tokens& tokens, const float* x, float* mixed);

}  // namespace slm
