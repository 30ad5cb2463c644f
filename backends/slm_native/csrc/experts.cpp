#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace slm {

namespace {

// Of the thread that called.
thread_local Scratch read_scratch, scores_scratch, rows_scratch;

constexpr std::size_t least_part = 1 << 13;  // values; less is done before a thread has heard of it

// task(begin, end) for parts of `n` rows of so many values.
template <class Task>
void by_rows(Pool& pool, std::size_t n, std::size_t width, const Task& task) {
    const std::size_t step = std::max<std::size_t>(1, least_part / std::max<std::size_t>(1, width));
    pool.run((n + step - 1) / step, [&](std::size_t i) { task(i * step, std::min(n, (i + 1) * step)); });
}

void add_scaled(float* y, const float* x, float factor, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

// What routing says of a batch.
struct Routes {
    std::vector<Chosen> chosen;        // [n_tokens][n_used]
    std::vector<float> shared_weight;  // [n_tokens]; empty where the shared expert has no gate
};

constexpr std::size_t sums_a_score = 16;  // exp and sorting take as long as so many sums

Routes routes_of(const IsaKernels& kernels, Pool& pool, const Mixture& m, const float* read, const float* told,
                 std::size_t n_tokens) {
    const std::size_t n_experts = m.choice.n_experts, n_used = m.choice.n_used;
    Routes routes;
    float* scores = scores_scratch.room<float>(n_tokens * n_experts);
    std::vector<Multiplication> products{{m.router.matrix, told, n_tokens, scores}};
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
        for (std::size_t t = begin; t < end; ++t) choose(m.choice, scores + t * n_experts, &routes.chosen[t * n_used]);
    });
    return routes;
}

// An expert and the rows that it reads and makes.
struct Group {
    const FeedForward* expert;
    const float* x;
    const std::uint32_t* which;  // of x; null for the first ones
    std::size_t n_rows;
    float *gate, *up, *made;
};

// The (token, expert) pairs of a batch, those of one expert side by side.
struct Pairs {
    std::vector<std::size_t> first;     // of each expert, and the end [n_experts + 1]
    std::vector<std::uint32_t> tokens;  // of each pair
    std::vector<std::uint32_t> places;  // where the pairs of each token are, [n_tokens][n_used]
};

Pairs pairs_of(const Mixture& m, const Routes& routes) {
    const std::size_t n_used = m.choice.n_used, n_pairs = routes.chosen.size();
    Pairs pairs;
    pairs.first.resize(m.choice.n_experts + 1), pairs.tokens.resize(n_pairs), pairs.places.resize(n_pairs);
    for (const Chosen& one : routes.chosen) ++pairs.first[one.expert + 1];
    for (std::size_t i = 0; i < m.choice.n_experts; ++i) pairs.first[i + 1] += pairs.first[i];
    std::vector<std::size_t> next = pairs.first;
    for (std::size_t i = 0; i < n_pairs; ++i) {
        const std::size_t place = next[routes.chosen[i].expert]++;
        pairs.tokens[place] = std::uint32_t(i / n_used), pairs.places[i] = std::uint32_t(place);
    }
    return pairs;
}

// What the rows of all groups take, one group after another.
class GroupRoom {
public:
    GroupRoom(const Mixture& m, std::size_t n_pairs, std::size_t n_tokens, std::size_t n_scaled) {
        const std::size_t n_ff = m.experts[0].up.matrix->n_out;
        const std::size_t n_shared_ff = m.shared.up.matrix ? m.shared.up.matrix->n_out : 0;
        width_ = m.experts[0].down.matrix->n_out;
        const std::size_t n_inner = n_pairs * n_ff + n_tokens * n_shared_ff;
        const std::size_t n_made = (n_pairs + (n_shared_ff ? n_tokens : 0)) * width_;
        gates_ = rows_scratch.room<float>(2 * n_inner + n_made + n_scaled);
        ups_ = gates_ + n_inner, made_ = ups_ + n_inner, scaled_ = made_ + n_made;
    }
    Group group(const FeedForward& expert, const float* x, const std::uint32_t* which, std::size_t n_rows) {
        const Group made{&expert, x, which, n_rows, gates_, ups_, made_};
        gates_ += n_rows * expert.up.matrix->n_out, ups_ += n_rows * expert.up.matrix->n_out, made_ += n_rows * width_;
        return made;
    }
    float* scaled() const { return scaled_; }

private:
    std::size_t width_;
    float *gates_, *ups_, *made_, *scaled_;
};

// What all pairs read, times their weights.
void scale_rows(Pool& pool, const Routes& routes, const Pairs& pairs, std::size_t n_used, std::size_t width,
                const float* x, float* to) {
    by_rows(pool, pairs.places.size(), width, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            float* row = to + pairs.places[i] * width;
            std::fill_n(row, width, 0.0f);
            add_scaled(row, x + i / n_used * width, routes.chosen[i].weight, width);
        }
    });
}

// The experts that a token of the batch uses, and the shared one behind them.
std::vector<Group> groups_of(Pool& pool, const Mixture& m, const Routes& routes, const Pairs& pairs, const float* x,
                             std::size_t n_tokens) {
    const std::size_t width = m.router.matrix->n_in, n_pairs = pairs.tokens.size();
    GroupRoom room(m, n_pairs, n_tokens, m.scales_input ? n_pairs * width : 0);
    if (m.scales_input) scale_rows(pool, routes, pairs, m.choice.n_used, width, x, room.scaled());
    std::vector<Group> groups;
    for (std::size_t i = 0; i < m.experts.size(); ++i) {
        const std::size_t first = pairs.first[i], n_rows = pairs.first[i + 1] - first;
        if (n_rows == 0) continue;
        const float* read = m.scales_input ? room.scaled() + first * width : x;
        const std::uint32_t* which = m.scales_input || n_rows == n_tokens ? nullptr : &pairs.tokens[first];
        groups.push_back(room.group(m.experts[i], read, which, n_rows));
    }
    if (m.shared.up.matrix) groups.push_back(room.group(m.shared, x, nullptr, n_tokens));
    return groups;
}

// The inner values of some rows of a group, in `gate`.
void activate(const IsaKernels& kernels, const Mixture& m, const Group& group, std::size_t begin, std::size_t end) {
    const Linear &by_gate = group.expert->gate, &by_up = group.expert->up;
    const std::size_t n = by_up.matrix->n_out, n_rows = end - begin;
    float *gate = group.gate + begin * n, *up = group.up + begin * n;
    finish(by_up, up, n_rows);
    if (!by_gate.matrix) return kernels.activate(m.activation, up, nullptr, n_rows * n, gate);
    finish(by_gate, gate, n_rows);
    kernels.activate(m.activation, gate, up, n_rows * n, gate);
}

// The inner values of all experts, in `gate` of each group.
void go_up(const IsaKernels& kernels, Pool& pool, const Mixture& m, const std::vector<Group>& groups) {
    std::vector<Multiplication> products;
    std::size_t n_rows = 0, widest = 0;
    for (const Group& g : groups) {
        if (g.expert->gate.matrix) products.push_back({g.expert->gate.matrix, g.x, g.n_rows, g.gate, g.which});
        products.push_back({g.expert->up.matrix, g.x, g.n_rows, g.up, g.which});
        n_rows += g.n_rows, widest = std::max(widest, g.expert->up.matrix->n_out);
    }
    multiply_all(kernels, pool, products);
    by_rows(pool, n_rows, widest, [&](std::size_t begin, std::size_t end) {
        std::size_t first = 0;  // of the group's rows among all
        for (const Group& g : groups) {
            const std::size_t from = std::max(begin, first), to = std::min(end, first + g.n_rows);
            if (from < to) activate(kernels, m, g, from - first, to - first);
            first += g.n_rows;
        }
    });
}

void go_down(const IsaKernels& kernels, Pool& pool, const std::vector<Group>& groups) {
    std::vector<Multiplication> products;
    for (const Group& g : groups) products.push_back({g.expert->down.matrix, g.gate, g.n_rows, g.made});
    multiply_all(kernels, pool, products);
}

void add_weighted(float* y, const float* made, const Linear& down, float weight) {
    add_scaled(y, made, weight * down.scale, down.matrix->n_out);
    if (down.bias) add_scaled(y, down.bias, weight, down.matrix->n_out);
}

// The weighted sum of what the experts of each token have made.
void gather(Pool& pool, const Mixture& m, const Routes& routes, const Pairs& pairs, const std::vector<Group>& groups,
            std::size_t n_tokens, float* y) {
    const std::size_t n_used = m.choice.n_used, width = m.experts[0].down.matrix->n_out;
    const float *made = groups[0].made, *shared = m.shared.up.matrix ? groups.back().made : nullptr;
    by_rows(pool, n_tokens, width * n_used, [&](std::size_t begin, std::size_t end) {
        std::fill(y + begin * width, y + end * width, 0.0f);
        for (std::size_t t = begin; t < end; ++t) {
            for (std::size_t i = t * n_used; i < (t + 1) * n_used; ++i) {
                const Chosen& one = routes.chosen[i];
                const float weight = m.scales_input ? 1.0f : one.weight;
                add_weighted(y + t * width, made + pairs.places[i] * width, m.experts[one.expert].down, weight);
            }
            const float weight = routes.shared_weight.empty() ? 1.0f : routes.shared_weight[t];
            if (shared) add_weighted(y + t * width, shared + t * width, m.shared.down, weight);
        }
    });
}

}  // namespace

void mix(const IsaKernels& kernels, Pool& pool, const Mixture& mixture, const float* x, const float* told,
         std::size_t n_tokens, const Norm& norm, float* y) {
    if (n_tokens == 0) return;
    const float* read = x;
    if (norm.weight) {
        float* made = read_scratch.room<float>(n_tokens * norm.width);
        normalize(kernels, pool, x, n_tokens * norm.width, norm, made);
        read = made;
    }
    const Routes routes = routes_of(kernels, pool, mixture, read, told ? told : read, n_tokens);
    const Pairs pairs = pairs_of(mixture, routes);
    const std::vector<Group> groups = groups_of(pool, mixture, routes, pairs, read, n_tokens);
    go_up(kernels, pool, mixture, groups);
    go_down(kernels, pool, groups);
    gather(pool, mixture, routes, pairs, groups, n_tokens, y);
}

}  // namespace slm
