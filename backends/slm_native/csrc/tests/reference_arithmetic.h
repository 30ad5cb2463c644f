// Products, norms, feed-forward layers and experts in plain arithmetic, in double precision.
#pragma once

#include <optional>
#include <vector>

#include "layers/moe.h"

namespace slm {

using Wide = std::vector<double>;

Wide normed(const Wide& x, const Norm& norm);
Wide times(const Wide& x, const Linear& linear);
Wide activated(const Activation& activation, Wide x);  // silu or gelu_tanh

// down(activation(gate(x)) * up(x)), of gates what is above the threshold; without a gate down(activation(up(x))).
Wide made_by(const FeedForward& by, const Activation& activation, std::optional<float> threshold, const Wide& x);

// The weighted sum of what the experts make of each token, of softmax or sigmoid.
Wide mixed_by_experts(const Mixture& mixture, const Wide& x);

}  // namespace slm
