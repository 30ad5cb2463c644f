#include "layers/routing.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

namespace slm {

namespace {

constexpr float near_by = 0.02f;  // twice the jitter noise in Phi 3.5 MoE's training; model files do not contain it
constexpr float nothing = -std::numeric_limits<float>::infinity();

// Orders indices by descending values, equal values by ascending index; NaN comes last.
class Descending {
public:
    explicit Descending(const float* values) : values_(values) {}
    bool operator()(std::size_t a, std::size_t b) const {
        const float x = values_[a], y = values_[b];
        if (std::isnan(x) != std::isnan(y)) return std::isnan(y);
        return x > y || (!(x < y) && a < b);
    }

private:
    const float* values_;
};

std::vector<std::size_t> top_k(const std::vector<float>& values, std::size_t n) {
    std::vector<std::size_t> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + std::ptrdiff_t(n), order.end(), Descending(values.data()));
    order.resize(n);
    return order;
}

void softmax(std::vector<float>& values) {
    const float largest = *std::max_element(values.begin(), values.end());
    float total = 0;
    for (float& value : values) total += value = std::exp(value - largest);
    for (float& value : values) value /= total;
}

std::vector<float> shares_of(Gating gating, const float* scores, std::size_t n) {
    std::vector<float> shares(scores, scores + n);
    if (gating == Gating::softmax) softmax(shares);
    if (gating == Gating::sigmoid)
        for (float& share : shares) share = 1 / (1 + std::exp(-share));
    return shares;
}

float sum_of_best_two(const float* values, std::size_t n) {
    float best = values[0], second = nothing;
    for (std::size_t i = 1; i < n; ++i) {
        second = std::max(second, std::min(best, values[i]));
        best = std::max(best, values[i]);
    }
    return n > 1 ? best + second : best;
}

// Excludes experts outside the groups whose two best experts have the largest sums.
void keep_best_groups(const RoutingOptions& routing, std::vector<float>& ranked) {
    const std::size_t size = routing.n_experts / routing.n_groups;
    std::vector<float> sums(routing.n_groups);
    for (std::size_t g = 0; g < routing.n_groups; ++g) sums[g] = sum_of_best_two(&ranked[g * size], size);
    std::vector<bool> kept(routing.n_groups);
    for (std::size_t g : top_k(sums, routing.n_groups_used)) kept[g] = true;
    for (std::size_t i = 0; i < routing.n_experts; ++i)
        if (!kept[i / size]) ranked[i] = nothing;
}

// SparseMixer weights: the softmax of each selected expert over the remaining experts with nearly the same score.
std::vector<float> sparse_mixer(const float* scores, std::size_t n, const std::vector<std::size_t>& chosen) {
    std::vector<float> left(scores, scores + n), weights;
    for (std::size_t expert : chosen) {
        const float best = scores[expert];
        float total = 0;
        for (std::size_t i = 0; i < n; ++i)
            if (best - scores[i] <= near_by * std::max(std::fabs(scores[i]), best)) total += std::exp(left[i] - best);
        weights.push_back(1 / total);
        left[expert] = nothing;
    }
    return weights;
}

}  // namespace

void route(const RoutingOptions& routing, const float* scores, ExpertWeight* to) {
    const std::vector<float> shares = shares_of(routing.gating, scores, routing.n_experts);
    std::vector<float> ranked = shares;
    if (routing.bias) std::transform(ranked.begin(), ranked.end(), routing.bias, ranked.begin(), std::plus<>());
    if (routing.n_groups > 1) keep_best_groups(routing, ranked);
    const std::vector<std::size_t> chosen = top_k(ranked, routing.n_used);
    std::vector<float> weights;
    weights.reserve(chosen.size());
    for (std::size_t expert : chosen) weights.push_back(shares[expert]);
    if (routing.gating == Gating::sparse_mixer) weights = sparse_mixer(scores, routing.n_experts, chosen);
    if (routing.gating == Gating::softmax_of_chosen) softmax(weights);
    const float total = routing.normalized ? std::accumulate(weights.begin(), weights.end(), 0.0f) : 1.0f;
    for (std::size_t rank = 0; rank < routing.n_used; ++rank)
        to[rank] = {chosen[rank], weights[rank] / total * routing.scale};
}

}  // namespace slm
