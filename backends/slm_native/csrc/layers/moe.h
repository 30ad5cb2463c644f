// Mixture-of-experts (MoE) layers.
#pragma once

#include <cstddef>
#include <vector>

#include "matmul/products.h"
#include "layers/routing.h"

namespace slm {

// down(activation(gate(x)) * up(x)); without a matrix in `gate`, down(activation(up(x))).
struct FeedForward { Linear gate, up, down; };

// See Experts in slm_native/kernels/parameters.py.
struct MoeLayer {
    Linear router;
    RoutingOptions routing;
    std::vector<FeedForward> experts;
    Activation activation;
    bool scales_input;   // routing weights multiply the input of an expert, not its output
    FeedForward shared;  // the shared expert, used by every token; without matrices if there is none
    Linear shared_gate;  // gate of the shared expert, one output; without a matrix if there is none
};

// y = residual + scale * normalize(output of the experts).
struct Branch {
    Norm norm{};
    float scale = 1.0f;
    const float* residual = nullptr;  // [n_tokens][E] or null
};

// y [n_tokens][E]: the output of the experts that the router selects, for x after its norm; then `branch`. If
// `router_input` is null, the router reads the normalized x.
void run_moe(const IsaKernels& kernels, Pool& pool, const MoeLayer& moe, const float* x, const float* router_input,
             std::size_t n_tokens, const Norm& norm, const Branch& branch, float* y);

}  // namespace slm
