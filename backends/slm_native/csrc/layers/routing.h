// Selects the experts of a token.
#pragma once

#include <cstddef>

namespace slm {

enum class Gating { softmax, sigmoid, softmax_of_chosen, sparse_mixer };

// The selection rule; see ExpertsSpec in slm_core/architectures. All groups have the same number of experts.
struct RoutingOptions {
    std::size_t n_experts, n_used, n_groups, n_groups_used;
    Gating gating;
    bool normalized;
    float scale;
    const float* bias;  // [n_experts], added to scores for selection only; or null
};

struct ExpertWeight {
    std::size_t expert;
    float weight;
};

// The top n_used experts of one token in descending order; among equal scores the first wins. `scores` [n_experts] are
// the router's logits.
void route(const RoutingOptions& routing, const float* scores, ExpertWeight* to);

}  // namespace slm
