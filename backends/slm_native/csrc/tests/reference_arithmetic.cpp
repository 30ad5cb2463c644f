#include "tests/reference_arithmetic.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace slm {

namespace {

// max(0, x - (mean + threshold * standard deviation)) of each row.
void gaussian_topk(double threshold, std::size_t width, Wide& x) {
    for (std::size_t at = 0; at < x.size(); at += width) {
        const auto begin = x.begin() + std::ptrdiff_t(at), end = begin + std::ptrdiff_t(width);
        const double mean = std::accumulate(begin, end, 0.0) / double(width);
        double squares = 0;
        std::for_each(begin, end, [&](double value) { squares += (value - mean) * (value - mean); });
        const double least = mean + threshold * std::sqrt(squares / double(width));
        std::transform(begin, end, begin, [&](double value) { return std::max(0.0, value - least); });
    }
}

// Routing weights of all experts, before the selection.
Wide shares_of(const RoutingOptions& routing, Wide scores) {
    for (double& score : scores)
        score = routing.gating == Gating::sigmoid ? 1 / (1 + std::exp(-score)) : std::exp(score);
    const double total = routing.gating == Gating::sigmoid ? 1 : std::accumulate(scores.begin(), scores.end(), 0.0);
    for (double& score : scores) score /= total;
    return scores;
}

// Indices of the n largest values.
std::vector<std::size_t> largest(const Wide& values, std::size_t n) {
    std::vector<std::size_t> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return values[a] > values[b]; });
    order.resize(n);
    return order;
}

std::vector<std::size_t> chosen_of(const RoutingOptions& routing, Wide ranked) {
    for (std::size_t i = 0; routing.bias && i < ranked.size(); ++i) ranked[i] += double(routing.bias[i]);
    const std::size_t size = routing.n_experts / routing.n_groups;
    Wide sums;  // sums of the two best experts of each group
    for (std::size_t at = 0; at < ranked.size(); at += size) {
        Wide group(ranked.begin() + std::ptrdiff_t(at), ranked.begin() + std::ptrdiff_t(at + size));
        std::sort(group.begin(), group.end(), std::greater<>());
        sums.push_back(group[0] + (size > 1 ? group[1] : 0));
    }
    const auto kept = largest(sums, routing.n_groups_used);
    for (std::size_t i = 0; i < ranked.size(); ++i)
        if (std::find(kept.begin(), kept.end(), i / size) == kept.end()) ranked[i] = -1e9;
    return largest(ranked, routing.n_used);
}

}  // namespace

double dot(const float* a, const float* b, std::size_t n) { return std::inner_product(a, a + n, b, 0.0); }

double dot(const double* a, const double* b, std::size_t n) { return std::inner_product(a, a + n, b, 0.0); }

Wide normed(const Wide& x, const Norm& norm) {
    if (!norm.weight) return x;
    Wide y(x.size());
    for (std::size_t at = 0, row = 0; at < x.size(); at += norm.width, ++row) {
        const auto begin = x.begin() + std::ptrdiff_t(at), end = begin + std::ptrdiff_t(norm.width);
        const double mean = norm.centred ? std::accumulate(begin, end, 0.0) / double(norm.width) : 0;
        double squares = 0;
        for (std::size_t i = 0; i < norm.width; ++i) squares += (x[at + i] - mean) * (x[at + i] - mean);
        const double factor = 1 / std::sqrt(squares / double(norm.width) + double(norm.eps));
        const std::size_t weights = row % norm.n_rows * norm.width;
        for (std::size_t i = 0; i < norm.width; ++i)
            y[at + i] = (x[at + i] - mean) * factor * double(norm.weight[weights + i]) +
                        (norm.bias ? double(norm.bias[weights + i]) : 0);
    }
    return y;
}

Wide times(const Wide& x, const Linear& linear) {
    const Matrix& m = *linear.matrix;
    const auto* w = reinterpret_cast<const float*>(m.data);
    const std::size_t n = x.size() / m.n_in;
    Wide y(n * m.n_out);
    for (std::size_t t = 0; t < n; ++t)
        for (std::size_t r = 0; r < m.n_out; ++r) {
            double sum = 0;
            for (std::size_t i = 0; i < m.n_in; ++i) sum += x[t * m.n_in + i] * double(w[r * m.n_in + i]);
            y[t * m.n_out + r] = sum * double(linear.scale) + (linear.bias ? double(linear.bias[r]) : 0);
        }
    return y;
}

Wide activated(const Activation& activation, Wide x) {
    const double root = std::sqrt(2 / 3.14159265358979);
    for (double& u : x) {
        const double inner = activation.kind == ActivationKind::gelu_tanh ? 2 * root * (u + 0.044715 * u * u * u) : u;
        u /= 1 + std::exp(-inner);  // 1 + tanh(z) is 2 / (1 + exp(-2 z))
    }
    return x;
}

Wide feed_forward(const FeedForward& by, const Activation& activation, std::optional<float> threshold, const Wide& x) {
    Wide up = times(x, by.up);
    if (!by.gate.matrix) return times(activated(activation, up), by.down);
    Wide gate = times(x, by.gate);
    if (threshold) gaussian_topk(double(*threshold), by.gate.matrix->n_out, gate);
    gate = activated(activation, gate);
    std::transform(up.begin(), up.end(), gate.begin(), up.begin(), std::multiplies<>());
    return times(up, by.down);
}

Wide reference_moe(const MoeLayer& moe, const Wide& x) {
    const std::size_t width = moe.router.matrix->n_in;
    Wide y(x.size());
    const auto add = [&](const FeedForward& expert, std::size_t at, const Wide& token, double before, double after) {
        Wide read(token);
        for (double& value : read) value *= before;
        const Wide output = feed_forward(expert, moe.activation, {}, read);
        for (std::size_t i = 0; i < width; ++i) y[at + i] += after * output[i];
    };
    for (std::size_t at = 0; at < x.size(); at += width) {
        const Wide token(x.begin() + std::ptrdiff_t(at), x.begin() + std::ptrdiff_t(at + width));
        const Wide shares = shares_of(moe.routing, times(token, moe.router));
        const auto chosen = chosen_of(moe.routing, shares);
        double total = 0;
        for (std::size_t expert : chosen) total += shares[expert];
        for (std::size_t expert : chosen) {
            const double weight = shares[expert] / (moe.routing.normalized ? total : 1) * double(moe.routing.scale);
            add(moe.experts[expert], at, token, moe.scales_input ? weight : 1, moe.scales_input ? 1 : weight);
        }
        if (!moe.shared.up.matrix) continue;
        const double share = moe.shared_gate.matrix ? 1 / (1 + std::exp(-times(token, moe.shared_gate)[0])) : 1;
        add(moe.shared, at, token, 1, share);
    }
    return y;
}

}  // namespace slm
