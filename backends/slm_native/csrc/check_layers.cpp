#include "check_layers.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "layers.h"

namespace slm {

namespace {

using Wide = std::vector<double>;

constexpr std::size_t width = 40, n_heads = 6, n_kv_heads = 2, head_dim = 32, n_ff = 56, n_layers = 3, n_all = 150;
constexpr std::size_t steps[] = {70, 1, 6, 1, 64, 8};  // tokens of each batch: pages begin and end within them
constexpr float eps = 1e-3f;

// What rounding keys and values costs, as a share of the largest result: some steps of their codes.
constexpr double tolerance[n_kv_types] = {1e-5, 2e-3, 2e-2, 2e-2, 0.1, 0.2};

std::vector<float> random_floats(std::size_t n, unsigned seed, float scale) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> values(n);
    for (float& value : values) value = normal(generator);
    return values;
}

// A layer, all that it points to, and what only the plain computation reads.
struct Model {
    std::vector<std::vector<float>> vectors;
    std::vector<Matrix> matrices;
    std::vector<Layer> layers;
    std::vector<float> cos, sin;  // [n_all][head_dim / 2]
};

const float* vector_of(Model& model, std::size_t n) {
    return model.vectors.emplace_back(random_floats(n, unsigned(model.vectors.size()), 1)).data();
}

const Matrix* matrix_of(Model& model, const IsaKernels& kernels, std::size_t n_out, std::size_t n_in) {
    const auto& w = model.vectors.emplace_back(random_floats(n_out * n_in, unsigned(model.vectors.size()), 1 / std::sqrt(float(n_in))));
    const FloatKernels* floats = kernels.floats;
    while (floats->type != 0) ++floats;  // F32
    return &model.matrices.emplace_back(
        Matrix{nullptr, floats, reinterpret_cast<const std::uint8_t*>(w.data()), n_out, n_in, n_in * sizeof(float)});
}

Norm rms(const float* weight, std::size_t row) { return {weight, nullptr, row, 1, eps, false}; }

Norm layer_norm(Model& model) { return {vector_of(model, width), vector_of(model, width), width, 1, eps, true}; }

// The plainest layer, but for what every layer has: side by side, without a gate, shifted, limited, normalized after.
void make_other(Model& model, Layer& layer) {
    layer.attn_norm = layer_norm(model), layer.ffn_norm = layer_norm(model), layer.attn_post_norm = layer_norm(model);
    layer.k_norm = {vector_of(model, n_kv_heads * head_dim), nullptr, n_kv_heads * head_dim, 1, eps, false};
    layer.v = {}, layer.v_norm = {vector_of(model, n_kv_heads * head_dim), nullptr, head_dim, n_kv_heads, eps, false};
    layer.limit = 0.75f, layer.gating.gate = {}, layer.gating.activation.kind = ActivationKind::gelu_tanh;
    layer.gating.up.bias = vector_of(model, n_ff), layer.gating.up.scale = 0.5f;
    layer.residual_scale = 0.5f, layer.parallel = true;
}

std::unique_ptr<Model> model_of(const IsaKernels& kernels) {
    auto model = std::make_unique<Model>();
    Model& m = *model;
    m.matrices.reserve(7 * n_layers), m.vectors.reserve(32 * n_layers);
    const auto linear = [&](std::size_t n_out, std::size_t n_in, bool biased) {
        return Linear{matrix_of(m, kernels, n_out, n_in), biased ? vector_of(m, n_out) : nullptr};
    };
    for (std::size_t i = 0; i < n_layers; ++i) {
        const bool odd = i % 2;
        Layer layer{};
        layer.attn_norm = rms(vector_of(m, width), width), layer.ffn_norm = rms(odd ? nullptr : vector_of(m, width), width);
        layer.q = linear(n_heads * head_dim, width, odd), layer.k = linear(n_kv_heads * head_dim, width, odd);
        layer.v = linear(n_kv_heads * head_dim, width, odd), layer.output = linear(width, n_heads * head_dim, odd);
        layer.q_norm = rms(odd ? nullptr : vector_of(m, head_dim), head_dim), layer.k_norm = rms(odd ? nullptr : vector_of(m, head_dim), head_dim);
        layer.scoring = {0.2f, odd ? 4.0f : 0.0f, odd ? 20 : no_window, nullptr, odd ? vector_of(m, n_heads) : nullptr};
        layer.gating.gate = linear(n_ff, width, false), layer.gating.up = linear(n_ff, width, false), layer.residual_scale = layer.output_scale = 1;
        layer.down = linear(width, n_ff, odd);
        if (i == 2) make_other(m, layer);
        m.layers.push_back(layer);
    }
    for (std::size_t t = 0; t < n_all; ++t)
        for (std::size_t i = 0; i < head_dim / 2; ++i) {
            const double angle = double(t) * std::pow(1e4, -2.0 * double(i) / head_dim);
            m.cos.push_back(float(std::cos(angle))), m.sin.push_back(float(std::sin(angle)));
        }
    return model;
}

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
            y[at + i] = (x[at + i] - mean) * factor * double(norm.weight[weights + i]) + (norm.bias ? double(norm.bias[weights + i]) : 0);
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

Wide limited(Wide x, float limit) {
    for (double& value : x)
        if (limit != 0) value = std::clamp(value, -double(limit), double(limit));
    return x;
}

// What the feed-forward layer takes to its last matrix.
Wide gated(const Layer& layer, const Wide& x) {
    const Wide in = normed(x, layer.ffn_norm);
    Wide up = times(in, layer.gating.up);
    if (layer.gating.gate.matrix) {
        const Wide gate = times(in, layer.gating.gate);
        for (std::size_t j = 0; j < up.size(); ++j) up[j] *= gate[j] / (1 + std::exp(-gate[j]));
        return up;
    }
    for (double& u : up) u = u / 2 * (1 + std::tanh(std::sqrt(2 / 3.14159265358979) * (u + 0.044715 * u * u * u)));
    return up;
}

// x and a branch of it.
Wide sum_of(const Layer& layer, const Wide& x, const Wide& branch) {
    Wide y(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) y[i] = x[i] + double(layer.residual_scale) * branch[i];
    return y;
}

void turn(const Model& model, Wide& x, std::size_t heads, bool interleaved) {
    constexpr std::size_t half = head_dim / 2;
    for (std::size_t at = 0; at < x.size(); at += head_dim)
        for (std::size_t i = 0; i < half; ++i) {
            const std::size_t angle = at / (heads * head_dim) * half + i;
            double &a = x[at + (interleaved ? 2 * i : i)], &b = x[at + (interleaved ? 2 * i + 1 : half + i)];
            const double c = double(model.cos[angle]), s = double(model.sin[angle]), turned = a * c - b * s;
            b = b * c + a * s, a = turned;
        }
}

Wide attended(const Scoring& scoring, const Wide& q, const Wide& k, const Wide& v) {
    Wide mixed(q.size());
    for (std::size_t t = 0; t < n_all; ++t)
        for (std::size_t head = 0; head < n_heads; ++head) {
            const std::size_t kv = head / (n_heads / n_kv_heads), first = t + 1 < scoring.window ? 0 : t + 1 - scoring.window;
            double total = scoring.sinks ? std::exp(double(scoring.sinks[head])) : 0;
            double* out = &mixed[(t * n_heads + head) * head_dim];
            for (std::size_t s = first; s <= t; ++s) {
                double score = 0;
                for (std::size_t i = 0; i < head_dim; ++i) score += q[(t * n_heads + head) * head_dim + i] * k[(s * n_kv_heads + kv) * head_dim + i];
                score *= double(scoring.scale);
                if (scoring.softcap != 0) score = double(scoring.softcap) * std::tanh(score / double(scoring.softcap));
                total += std::exp(score);
                for (std::size_t i = 0; i < head_dim; ++i) out[i] += std::exp(score) * v[(s * n_kv_heads + kv) * head_dim + i];
            }
            for (std::size_t i = 0; i < head_dim; ++i) out[i] /= total;
        }
    return mixed;
}

// All tokens as one prompt.
Wide expected(const Model& model, const std::vector<float>& x0) {
    Wide x(x0.begin(), x0.end());
    for (std::size_t i = 0; i < n_layers; ++i) {
        const Layer& layer = model.layers[i];
        const Wide in = normed(x, layer.attn_norm), keys = limited(times(in, layer.k), layer.limit);
        const Wide values = layer.v.matrix ? limited(times(in, layer.v), layer.limit) : keys;
        Wide q = normed(limited(times(in, layer.q), layer.limit), layer.q_norm), k = normed(keys, layer.k_norm);
        turn(model, q, n_heads, i % 2), turn(model, k, n_kv_heads, i % 2);
        const Wide mixed = times(attended(layer.scoring, q, k, normed(values, layer.v_norm)), layer.output);
        const Wide after = sum_of(layer, x, normed(mixed, layer.attn_post_norm));
        x = sum_of(layer, after, normed(times(gated(layer, layer.parallel ? x : after), layer.down), layer.ffn_post_norm));
    }
    return x;
}

// The same in batches, on pages that lie in another order.
std::vector<float> found(const Model& model, const IsaKernels& kernels, Pool& pool, KvType type, std::vector<float> x) {
    static const std::int32_t pages[] = {3, 0, 2};
    std::size_t bytes[most_planes], page_bytes = 0;
    token_bytes(type, head_dim, bytes);
    for (std::size_t plane : bytes) page_bytes += 2 * n_layers * n_kv_heads * page_tokens * plane;
    const std::size_t n_pages = 4;
    std::unique_ptr<std::uint8_t[]> memory(new std::uint8_t[n_pages * page_bytes]());
    std::vector<KvLayer> caches;
    for (std::size_t i = 0; i < n_layers; ++i)
        caches.push_back(layer_of(memory.get(), n_pages, page_bytes, type, type, false, {n_layers, i, n_kv_heads, head_dim}));
    std::size_t start = 0;
    for (std::size_t n : steps) {
        std::vector<std::int32_t> tokens(n);
        std::iota(tokens.begin(), tokens.end(), 0);
        std::vector<std::int64_t> page(n), slot(n);
        for (std::size_t t = 0; t < n; ++t) page[t] = pages[(start + t) / page_tokens], slot[t] = std::int64_t((start + t) % page_tokens);
        const std::vector<Run> runs{{tokens.data(), pages, n, start + n}};
        std::vector<Place> places;
        for (std::size_t i = 0; i < n_layers; ++i)
            places.push_back({&caches[i], {&model.cos[start * head_dim / 2], &model.sin[start * head_dim / 2], head_dim / 2, i % 2 == 1}});
        run_layers(kernels, pool, model.layers, places, {n, page.data(), slot.data(), &runs}, nullptr, 1, &x[start * width]);
        start += n;
    }
    return x;
}

}  // namespace

bool check_layers(Isa isa, int n_threads) {
    const IsaKernels& kernels = kernels_of(isa);
    const auto pool = Pool::shared(n_threads);
    const auto model = model_of(kernels);
    const std::vector<float> x = random_floats(n_all * width, 99, 1);
    const Wide wanted = expected(*model, x);
    const double largest = std::abs(*std::max_element(wanted.begin(), wanted.end(), [](double a, double b) { return std::abs(a) < std::abs(b); }));
    bool all_right = true;
    for (std::size_t type = 0; type < n_kv_types; ++type) {
        const std::vector<float> y = found(*model, kernels, *pool, KvType(type), x);
        double worst = 0;
        for (std::size_t i = 0; i < y.size(); ++i)
            if (const double off = std::abs(double(y[i]) - wanted[i]) / largest; !(off <= worst)) worst = off;
        if (worst <= tolerance[type]) continue;
        all_right = false;
        std::printf("%s, %d threads: layers with KV type %zu: off by %g of the largest\n", name_of(isa), n_threads, type, worst);
    }
    return all_right;
}

}  // namespace slm
