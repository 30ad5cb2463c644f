#include "tests/check_models.h"

#include <cmath>
#include <random>

namespace slm {

namespace {

// Widths of the model, of feed-forward layers, of per-layer embeddings.
constexpr std::size_t width = 40, n_ff = 56, n_low = 12;
constexpr float eps = 1e-3f;

// Adds layers, with the memory of their weights, to a model.
class Maker {
public:
    Maker(const IsaKernels& kernels, Model& model) : floats_(kernels.floats), model_(model) {
        while (floats_->type != 0) ++floats_;  // F32
    }

    const float* vector(std::size_t n, float scale = 1) {
        return model_.vectors.emplace_back(random_floats(n, seed(), scale)).data();
    }

    const Matrix* matrix(std::size_t n_out, std::size_t n_in) {
        const auto& w = model_.vectors.emplace_back(random_floats(n_out * n_in, seed(), 1 / std::sqrt(float(n_in))));
        return &model_.matrices.emplace_back(Matrix{nullptr, floats_, reinterpret_cast<const std::uint8_t*>(w.data()),
                                                    n_out, n_in, n_in * sizeof(float)});
    }

    Linear linear(std::size_t n_out, std::size_t n_in, bool biased = false) {
        return {matrix(n_out, n_in), biased ? vector(n_out) : nullptr};
    }
    Norm rms(std::size_t row, bool there = true) {
        return {there ? vector(row) : nullptr, nullptr, row, 1, eps, false};
    }
    Norm layer_norm() { return {vector(width), vector(width), width, 1, eps, true}; }
    FeedForward feed_forward(std::size_t n) {
        return {linear(n, width), linear(n, width, true), linear(width, n, true)};
    }

    // The parts of every layer, without queries, keys and values.
    Layer layer(std::size_t n_mixed) {
        Layer result{};
        result.attn_norm = rms(width), result.ffn_norm = rms(width), result.output = linear(width, n_mixed);
        result.scoring = {0.2f, 0.0f, no_window, nullptr, nullptr}, result.residual_scale = result.output_scale = 1;
        result.gating.gate = linear(n_ff, width), result.gating.up = linear(n_ff, width),
        result.down = linear(width, n_ff);
        return result;
    }

    // Attention with separate queries, keys and values.
    Layer heads_layer(bool biased) {
        const std::size_t n_q = model_.n_heads * model_.head_dim, n_kv = model_.n_kv_heads * model_.head_dim;
        Layer result = layer(n_q);
        result.q = linear(n_q, width, biased), result.k = linear(n_kv, width, biased),
        result.v = linear(n_kv, width, biased);
        return result;
    }

    void give_experts(Layer& layer, RoutingOptions routing, bool scales_input) {
        MoeLayer& m = model_.moe_layers.emplace_back();
        m.router = linear(routing.n_experts, width), m.routing = routing, m.scales_input = scales_input;
        for (std::size_t i = 0; i < routing.n_experts; ++i) m.experts.push_back(feed_forward(24));
        if (!scales_input) m.shared = feed_forward(n_ff), m.shared_gate = linear(1, width);
        layer.gating = {}, layer.down = {}, layer.moe = &m;
    }

    void give_embedding(Layer& layer) {
        layer.embedding = {
            linear(n_low, width), linear(width, n_low), rms(width), {ActivationKind::gelu_tanh, 0, 0, 0, 0}};
        model_.layer_embeddings.push_back(random_floats(n_all * n_low, seed(), 1));
    }

    void add(const Layer& layer, std::size_t cache) { model_.layers.push_back(layer), model_.caches.push_back(cache); }

private:
    unsigned seed() const { return unsigned(model_.vectors.size() + model_.layer_embeddings.size()); }

    const FloatKernels* floats_;
    Model& model_;
};

std::unique_ptr<Model> model_of(std::size_t n_streams, std::size_t n_heads, std::size_t n_kv_heads,
                                std::size_t head_dim, std::size_t n_rotated, bool is_latent) {
    auto model = std::make_unique<Model>();
    model->width = width, model->n_streams = n_streams, model->n_heads = n_heads, model->n_kv_heads = n_kv_heads;
    model->head_dim = head_dim, model->n_rotated = n_rotated, model->is_latent = is_latent;
    for (std::size_t t = 0; t < n_all; ++t)
        for (std::size_t i = 0; i < n_rotated / 2; ++i) {
            const double angle = double(t) * std::pow(1e4, -2.0 * double(i) / double(n_rotated));
            model->cos.push_back(float(std::cos(angle))), model->sin.push_back(float(std::sin(angle)));
        }
    return model;
}

// Other variants of most parts: parallel, layer norms, no gate, bias, clamped, post-norms.
void make_other(Maker& make, const Model& model, Layer& layer) {
    const std::size_t n_kv = model.n_kv_heads * model.head_dim;
    layer.attn_norm = make.layer_norm(), layer.ffn_norm = make.layer_norm(), layer.attn_post_norm = make.layer_norm();
    layer.k_norm = make.rms(n_kv);
    layer.v = {}, layer.v_norm = {make.vector(n_kv), nullptr, model.head_dim, model.n_kv_heads, eps, false};
    layer.limit = 0.75f, layer.gating.gate = {}, layer.gating.activation.kind = ActivationKind::gelu_tanh;
    layer.gating.up.bias = make.vector(n_ff), layer.gating.up.scale = 0.5f;
    layer.residual_scale = 0.5f, layer.parallel = true;
}

std::unique_ptr<Model> of_heads(const IsaKernels& kernels) {
    auto model = model_of(1, 6, 2, 32, 32, false);
    Maker make(kernels, *model);
    for (std::size_t i = 0; i < 3; ++i) {
        const bool odd = i % 2;
        Layer layer = make.heads_layer(odd);
        layer.q_norm = make.rms(32, !odd), layer.k_norm = make.rms(32, !odd);
        if (odd) layer.scoring = {0.2f, 4.0f, 20, nullptr, make.vector(6)}, layer.ffn_norm = {};
        if (i == 2) make_other(make, *model, layer);
        make.add(layer, i);
    }
    return model;
}

// MLA: heads with 20 unrotated and 16 rotated values, latents of 48, head outputs of 12.
std::unique_ptr<Model> of_latents(const IsaKernels& kernels) {
    constexpr std::size_t n_heads = 3, nope = 20, rotated = 16, rank = 48, n_result = 12, n_low_q = 28;
    constexpr std::size_t n_q = n_heads * (nope + rotated);
    auto model = model_of(1, n_heads, 1, rank + rotated, rotated, true);
    Maker make(kernels, *model);
    for (std::size_t i = 0; i < 2; ++i) {
        const bool compressed = i == 0;
        Layer layer = make.layer(n_heads * n_result);
        auto &k_up = model->up.emplace_back(), &v_up = model->up.emplace_back();
        for (std::size_t head = 0; head < n_heads; ++head)
            k_up.push_back(make.matrix(rank, nope)), v_up.push_back(make.matrix(n_result, rank));
        layer.latent = {compressed ? make.linear(n_low_q, width) : Linear{},
                        make.rms(n_low_q, compressed),
                        make.linear(n_q, compressed ? n_low_q : width),
                        make.linear(rank + rotated, width, true),
                        make.rms(rank, compressed),
                        k_up,
                        v_up};
        make.add(layer, i);
    }
    return model;
}

// AltUp with three residual streams, the second active; the last layer reads the keys and values of the one before.
std::unique_ptr<Model> of_streams(const IsaKernels& kernels) {
    constexpr std::size_t n = 3;
    auto model = model_of(n, 4, 2, 32, 32, false);
    Maker make(kernels, *model);
    for (std::size_t i = 0; i < 3; ++i) {
        Layer layer = make.heads_layer(false);
        layer.k_norm = make.rms(32), layer.v_norm = {make.vector(64), nullptr, 32, 2, eps, false},
        layer.attn_post_norm = make.rms(width);
        layer.left = make.linear(16, width), layer.right = make.linear(width, 16), layer.right_norm = make.rms(width);
        layer.gating.activation.kind = ActivationKind::gelu_tanh, layer.ffn_post_norm = make.rms(width);
        if (i == 1) layer.gating.threshold = 0.5f;
        if (i == 2) layer.k = layer.v = {};
        const Norm router_norm{make.vector(width, 1 / float(width)), nullptr, width, 1, eps, false};
        layer.altup = {make.linear(n, width), make.linear(n * n, n), make.linear(n, n),
                       router_norm,           make.vector(width),    1};
        make.give_embedding(layer), make.add(layer, i == 2 ? 1 : i);
    }
    return model;
}

// MoE layers with per-layer embeddings.
std::unique_ptr<Model> of_experts(const IsaKernels& kernels) {
    auto model = model_of(1, 4, 2, 32, 32, false);
    Maker make(kernels, *model);
    const RoutingOptions routings[] = {{6, 2, 1, 1, Gating::softmax, true, 1.0f, nullptr},
                                       {8, 3, 4, 2, Gating::sigmoid, false, 0.7f, make.vector(8)}};
    for (std::size_t i = 0; i < 2; ++i) {
        Layer layer = make.heads_layer(true);
        make.give_experts(layer, routings[i], i == 1), make.give_embedding(layer);
        if (i == 0) layer.ffn_post_norm = make.rms(width), layer.residual_scale = 0.5f, layer.output_scale = 0.75f;
        make.add(layer, i);
    }
    return model;
}

}  // namespace

std::vector<float> random_floats(std::size_t n, unsigned seed, float scale) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> values(n);
    for (float& value : values) value = normal(generator);
    return values;
}

std::vector<NamedModel> models_of(const IsaKernels& kernels) {
    std::vector<NamedModel> models;
    models.push_back({"heads", of_heads(kernels), true});
    models.push_back({"latents", of_latents(kernels), true});
    models.push_back({"streams", of_streams(kernels), false});
    models.push_back({"experts", of_experts(kernels), false});
    return models;
}

}  // namespace slm
