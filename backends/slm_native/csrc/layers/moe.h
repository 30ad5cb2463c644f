// Layers of experts, of which each token uses a few.
#pragma once

#include <cstddef>
#include <vector>

#include "matmul/products.h"
#include "layers/routing.h"

namespace slm {

// down(activation(gate(x)) * up(x)); activation(up(x)) where `gate` has no matrix.
struct FeedForward { Linear gate, up, down; };

// See Experts in slm_native/kernels/parameters.py.
struct Mixture {
    Linear router;
    Choice choice;
    std::vector<FeedForward> experts;
    Activation activation;
    bool scales_input;   // weights go before the experts
    FeedForward shared;  // used by every token; without matrices where there is none
    Linear shared_gate;  // to one number; or without a matrix
};

// What becomes of what the experts of a token have made: residual + scale * normalized(it).
struct Branch {
    Norm norm{};
    float scale = 1.0f;
    const float* residual = nullptr;  // [n_tokens][E]; null for none
};

// y [n_tokens][E] = what the experts, chosen by what the router makes of `told`, make of x, normalized first, and then what
// `branch` says. Where `told` is null, the router reads what the experts read.
void mix(const IsaKernels& kernels, Pool& pool, const Mixture& mixture, const float* x, const float* told,
         std::size_t n_tokens, const Norm& norm, const Branch& branch, float* y);

}  // namespace slm
