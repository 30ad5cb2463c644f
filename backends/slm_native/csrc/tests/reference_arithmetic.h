// Reference products, norms, feed-forward layers and MoE layers in double precision.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "layers/moe.h"

namespace slm {

using Wide = std::vector<double>;

// The dot product of n numbers.
double dot(const float* a, const float* b, std::size_t n);
double dot(const double* a, const double* b, std::size_t n);

Wide normed(const Wide& x, const Norm& norm);
Wide times(const Wide& x, const Linear& linear);
Wide activated(const Activation& activation, Wide x);  // silu or gelu_tanh

// down(activation(gate(x)) * up(x)), with gaussian top-k of the gates; without a gate, down(activation(up(x))).
Wide feed_forward(const FeedForward& by, const Activation& activation, std::optional<float> threshold, const Wide& x);

// The weighted sum of the experts of each token, with softmax or sigmoid gating.
Wide reference_moe(const MoeLayer& moe, const Wide& x);

}  // namespace slm
