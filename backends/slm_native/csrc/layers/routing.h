// Which experts of a layer a token uses.
#pragma once

#include <cstddef>

namespace slm {

enum class Gating { softmax, sigmoid, softmax_of_chosen, sparse_mixer };

// How experts are chosen; see ExpertsSpec in slm_core/architectures. Groups share out the experts evenly.
struct Choice {
    std::size_t n_experts, n_used, n_groups, n_groups_used;
    Gating gating;
    bool normalized;
    float scale;
    const float* bias;  // [n_experts], on what is compared alone; or null
};

struct Chosen {
    std::size_t expert;
    float weight;
};

// The experts [n_used] of one token, the best first, of equals the first; scores are what the router gives [n_experts].
void choose(const Choice& choice, const float* scores, Chosen* to);

}  // namespace slm
