#include "layers/moe.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "parallel_rows.h"

namespace slm {

namespace {

// All belong to the calling thread.
thread_local Scratch read_scratch, scores_scratch, rows_scratch;

// The routing of a batch.
struct Routes {
    std::vector<ExpertWeight> chosen;  // [n_tokens][n_used]
    std::vector<float> shared_weight;  // [n_tokens]; empty if the shared expert has no gate
};

constexpr std::size_t sums_a_score = 64;  // cost of a score (exp, sorting, memory) in multiply-adds

Routes routes_of(const IsaKernels& kernels, Pool& pool, const MoeLayer& m, const float* read, const float* router_input,
                 std::size_t n_tokens) {
    const std::size_t n_experts = m.routing.n_experts, n_used = m.routing.n_used;
    Routes routes;
    float* scores = scores_scratch.buffer<float>(n_tokens * n_experts);
    std::vector<Multiplication> products{{m.router.matrix, router_input, n_tokens, scores}};
    if (m.shared_gate.matrix) {
        routes.shared_weight.resize(n_tokens);
        products.push_back({m.shared_gate.matrix, read, n_tokens, routes.shared_weight.data()});
    }
    multiply_all(kernels, pool, products);
    finish(m.router, scores, n_tokens);
    if (m.shared_gate.matrix) finish(m.shared_gate, routes.shared_weight.data(), n_tokens);
    for (float& weight : routes.shared_weight) weight = 1 / (1 + std::exp(-weight));
    routes.chosen.resize(n_tokens * n_used);
    by_rows(pool, n_tokens, sums_a_score * n_experts, [&](std::size_t begin, std::size_t end) {
        for (std::size_t t = begin; t < end; ++t) route(m.routing, scores + t * n_experts, &routes.chosen[t * n_used]);
    });
    return routes;
}

// The input and output rows of one expert.
struct Group {
    const FeedForward* expert;
    const float* x;
    const std::uint32_t* which;  // indices of rows of x; null for the first n_rows
    std::size_t n_rows;
    float *gate, *up, *output;
};

// The (token, expert) pairs of a batch, sorted by expert.
struct Pairs {
    std::vector<std::size_t> first;     // first pair of each expert, and the end [n_experts + 1]
    std::vector<std::uint32_t> tokens;  // of each pair
    std::vector<std::uint32_t> inputs;  // indices of the pairs of each token [n_tokens][n_used]
};

Pairs pairs_of(const MoeLayer& m, const Routes& routes) {
    const std::size_t n_used = m.routing.n_used, n_pairs = routes.chosen.size();
    Pairs pairs;
    pairs.first.resize(m.routing.n_experts + 1), pairs.tokens.resize(n_pairs), pairs.inputs.resize(n_pairs);
    for (const ExpertWeight& one : routes.chosen) ++pairs.first[one.expert + 1];
    for (std::size_t i = 0; i < m.routing.n_experts; ++i) pairs.first[i + 1] += pairs.first[i];
    std::vector<std::size_t> next = pairs.first;
    for (std::size_t i = 0; i < n_pairs; ++i) {
        const std::size_t index = next[routes.chosen[i].expert]++;
        pairs.tokens[index] = std::uint32_t(i / n_used), pairs.inputs[i] = std::uint32_t(index);
    }
    return pairs;
}

// The buffers of all groups, one after another.
class GroupBuffers {
public:
    GroupBuffers(const MoeLayer& m, std::size_t n_pairs, std::size_t n_tokens, std::size_t n_scaled) {
        const std::size_t n_ff = m.experts[0].up.matrix->n_out;
        const std::size_t n_shared_ff = m.shared.up.matrix ? m.shared.up.matrix->n_out : 0;
        width_ = m.experts[0].down.matrix->n_out;
        const std::size_t n_inner = n_pairs * n_ff + n_tokens * n_shared_ff;
        const std::size_t n_outputs = (n_pairs + (n_shared_ff ? n_tokens : 0)) * width_;
        gates_ = rows_scratch.buffer<float>(2 * n_inner + n_outputs + n_scaled);
        ups_ = gates_ + n_inner, outputs_ = ups_ + n_inner, scaled_ = outputs_ + n_outputs;
    }
    Group group(const FeedForward& expert, const float* x, const std::uint32_t* which, std::size_t n_rows) {
        const Group group{&expert, x, which, n_rows, gates_, ups_, outputs_};
        gates_ += n_rows * expert.up.matrix->n_out, ups_ += n_rows * expert.up.matrix->n_out,
            outputs_ += n_rows * width_;
        return group;
    }
    float* scaled() const { return scaled_; }

private:
    std::size_t width_;
    float *gates_, *ups_, *outputs_, *scaled_;
};

// The inputs of all pairs, times their routing weights.
void scale_rows(const IsaKernels& kernels, Pool& pool, const Routes& routes, const Pairs& pairs, std::size_t n_used,
                std::size_t width, const float* x, float* to) {
    by_rows(pool, pairs.inputs.size(), width, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            const float* row = x + i / n_used * width;
            kernels.add_parts(nullptr, &row, &routes.chosen[i].weight, 1, width, to + pairs.inputs[i] * width);
        }
    });
}

// One group for each expert that the batch uses; the shared expert comes last.
std::vector<Group> groups_of(const IsaKernels& kernels, Pool& pool, const MoeLayer& m, const Routes& routes,
                             const Pairs& pairs, const float* x, std::size_t n_tokens) {
    const std::size_t width = m.router.matrix->n_in, n_pairs = pairs.tokens.size();
    GroupBuffers buffers(m, n_pairs, n_tokens, m.scales_input ? n_pairs * width : 0);
    if (m.scales_input) scale_rows(kernels, pool, routes, pairs, m.routing.n_used, width, x, buffers.scaled());
    std::vector<Group> groups;
    for (std::size_t i = 0; i < m.experts.size(); ++i) {
        const std::size_t first = pairs.first[i], n_rows = pairs.first[i + 1] - first;
        if (n_rows == 0) continue;
        const float* read = m.scales_input ? buffers.scaled() + first * width : x;
        const std::uint32_t* which = m.scales_input || n_rows == n_tokens ? nullptr : &pairs.tokens[first];
        groups.push_back(buffers.group(m.experts[i], read, which, n_rows));
    }
    if (m.shared.up.matrix) groups.push_back(buffers.group(m.shared, x, nullptr, n_tokens));
    return groups;
}

// activation(gate) * up of some rows of a group, in `gate`.
void activate(const IsaKernels& kernels, const MoeLayer& m, const Group& group, std::size_t begin, std::size_t end) {
    const Linear &by_gate = group.expert->gate, &by_up = group.expert->up;
    const std::size_t n = by_up.matrix->n_out, n_rows = end - begin;
    float *gate = group.gate + begin * n, *up = group.up + begin * n;
    finish(by_up, up, n_rows);
    if (!by_gate.matrix) return kernels.activate(m.activation, up, nullptr, n_rows * n, gate);
    finish(by_gate, gate, n_rows);
    kernels.activate(m.activation, gate, up, n_rows * n, gate);
}

// The inner activations of all experts, in `gate` of each group.
void up_projections(const IsaKernels& kernels, Pool& pool, const MoeLayer& m, const std::vector<Group>& groups) {
    std::vector<Multiplication> products;
    std::size_t n_rows = 0, widest = 0;
    for (const Group& g : groups) {
        if (g.expert->gate.matrix) products.push_back({g.expert->gate.matrix, g.x, g.n_rows, g.gate, g.which});
        products.push_back({g.expert->up.matrix, g.x, g.n_rows, g.up, g.which});
        n_rows += g.n_rows, widest = std::max(widest, g.expert->up.matrix->n_out);
    }
    multiply_all(kernels, pool, products);
    by_rows(pool, n_rows, widest, [&](std::size_t begin, std::size_t end) {
        std::size_t first = 0;  // row of the group among all rows
        for (const Group& g : groups) {
            const std::size_t from = std::max(begin, first), to = std::min(end, first + g.n_rows);
            if (from < to) activate(kernels, m, g, from - first, to - first);
            first += g.n_rows;
        }
    });
}

void down_projections(const IsaKernels& kernels, Pool& pool, const std::vector<Group>& groups) {
    std::vector<Multiplication> products;
    products.reserve(groups.size());
    for (const Group& g : groups) products.push_back({g.expert->down.matrix, g.gate, g.n_rows, g.output});
    multiply_all(kernels, pool, products);
}

// Rows of E numbers, with a factor each.
class WeightedRows {
public:
    void clear() { rows_.clear(), shares_.clear(); }
    void add(const float* row, const Linear& down, float weight) {
        rows_.push_back(row), shares_.push_back(weight * down.scale);
        if (down.bias) rows_.push_back(down.bias), shares_.push_back(weight);
    }
    void sum(const IsaKernels& kernels, const float* base, std::size_t width, float* y) const {
        kernels.add_parts(base, rows_.data(), shares_.data(), rows_.size(), width, y);
    }

private:
    std::vector<const float*> rows_;
    std::vector<float> shares_;
};

// The outputs of all pairs, and the shared expert's outputs for all tokens, or null.
struct Results { const float *routed, *shared; };

// Collects the rows whose sum is token t, times `scale`.
void gather(const MoeLayer& m, const Routes& routes, const Pairs& pairs, const Results& results, std::size_t t,
            float scale, WeightedRows& to) {
    const std::size_t n_used = m.routing.n_used, width = m.experts[0].down.matrix->n_out;
    to.clear();
    for (std::size_t i = t * n_used; i < (t + 1) * n_used; ++i) {
        const ExpertWeight& one = routes.chosen[i];
        to.add(results.routed + pairs.inputs[i] * width, m.experts[one.expert].down,
               m.scales_input ? scale : scale * one.weight);
    }
    const float weight = routes.shared_weight.empty() ? scale : scale * routes.shared_weight[t];
    if (results.shared) to.add(results.shared + t * width, m.shared.down, weight);
}

// The weighted sum of expert outputs of each token, then `branch`.
void combine(const IsaKernels& kernels, Pool& pool, const MoeLayer& m, const Routes& routes, const Pairs& pairs,
             const Results& results, std::size_t n_tokens, const Branch& branch, float* y) {
    const std::size_t width = m.experts[0].down.matrix->n_out;
    by_rows(pool, n_tokens, width * m.routing.n_used, [&](std::size_t begin, std::size_t end) {
        WeightedRows parts;
        for (std::size_t t = begin; t < end; ++t) {
            float* to = y + t * width;
            const float* residual = branch.residual ? branch.residual + t * width : nullptr;
            gather(m, routes, pairs, results, t, branch.norm.weight ? 1.0f : branch.scale, parts);
            parts.sum(kernels, branch.norm.weight ? nullptr : residual, width, to);
            if (!branch.norm.weight) continue;
            kernels.normalize(branch.norm, to, 1, to);
            const float* normed = to;
            kernels.add_parts(residual, &normed, &branch.scale, 1, width, to);
        }
    });
}

}  // namespace

void run_moe(const IsaKernels& kernels, Pool& pool, const MoeLayer& moe, const float* x, const float* router_input,
             std::size_t n_tokens, const Norm& norm, const Branch& branch, float* y) {
    if (n_tokens == 0) return;
    const float* read = x;
    if (norm.weight) {
        float* normed = read_scratch.buffer<float>(n_tokens * norm.width);
        normalize(kernels, pool, x, n_tokens * norm.width, norm, normed);
        read = normed;
    }
    const Routes routes = routes_of(kernels, pool, moe, read, router_input ? router_input : read, n_tokens);
    const Pairs pairs = pairs_of(moe, routes);
    const std::vector<Group> groups = groups_of(kernels, pool, moe, routes, pairs, read, n_tokens);
    up_projections(kernels, pool, moe, groups);
    down_projections(kernels, pool, groups);
    const Results results{groups[0].output, moe.shared.up.matrix ? groups.back().output : nullptr};
    combine(kernels, pool, moe, routes, pairs, results, n_tokens, branch, y);
}

}  // namespace slm
