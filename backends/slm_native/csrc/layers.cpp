#include "layers.h"

#include <algorithm>

namespace slm {

namespace {

thread_local Scratch flow_scratch;

// Activations of a batch between the steps of a layer.
struct Flow {
    float *q, *k, *v, *mixed, *inner, *after;
};

template <class Width>
std::size_t widest(std::span<const Layer> layers, const Width& width) {
    std::size_t most = 0;
    for (const Layer& layer : layers) most = std::max(most, width(layer));
    return most;
}

Flow flow_of(std::span<const Layer> layers, std::size_t n_tokens) {
    const std::size_t n_q = widest(layers, [](const Layer& l) { return l.q.matrix->n_out; });
    const std::size_t n_kv = widest(layers, [](const Layer& l) { return l.k.matrix->n_out; });
    const std::size_t n_ff = widest(layers, [](const Layer& l) { return l.up->n_out; });
    const std::size_t width = layers[0].q.matrix->n_in;
    float* memory = flow_scratch.room<float>(n_tokens * (2 * n_q + 2 * n_kv + n_ff + width));
    const auto take = [&](std::size_t n) {
        float* taken = memory;
        memory += n_tokens * n;
        return taken;
    };
    return {take(n_q), take(n_kv), take(n_kv), take(n_q), take(n_ff), take(width)};
}

void shift(float* y, const Linear& linear, std::size_t n_tokens) {
    if (!linear.bias) return;
    const std::size_t n = linear.matrix->n_out;
    for (std::size_t t = 0; t < n_tokens; ++t, y += n)
        for (std::size_t i = 0; i < n; ++i) y[i] += linear.bias[i];
}

void attend_in(const IsaKernels& kernels, Pool& pool, const Layer& layer, const Place& place, const Tokens& tokens, const float* x,
               const Flow& flow) {
    const KvLayer& cache = *place.cache;
    const std::size_t n = tokens.n_tokens, width = cache.head_dim, n_heads = layer.q.matrix->n_out / width;
    const Product products[3] = {{layer.q.matrix, flow.q}, {layer.k.matrix, flow.k}, {layer.v.matrix, flow.v}};
    project(kernels, pool, x, n, layer.attn_norm, products);
    shift(flow.q, layer.q, n), shift(flow.k, layer.k, n), shift(flow.v, layer.v, n);
    turn_heads(kernels, pool, flow.k, n, cache.n_kv_heads, width, layer.k_norm, place.rotation, flow.k);
    write(kernels, pool, cache, n, tokens.pages, tokens.slots, flow.k, flow.v);
    turn_heads(kernels, pool, flow.q, n, n_heads, width, layer.q_norm, place.rotation, flow.q);
    attend(kernels, pool, cache, *tokens.runs, layer.scoring, n_heads, flow.q, flow.mixed);
}

}  // namespace

void run_layers(const IsaKernels& kernels, Pool& pool, std::span<const Layer> layers, std::span<const Place> places,
                const Tokens& tokens, float* x) {
    if (layers.empty() || tokens.n_tokens == 0) return;
    const Flow flow = flow_of(layers, tokens.n_tokens);
    for (std::size_t i = 0; i < layers.size(); ++i) {
        const Layer& layer = layers[i];
        attend_in(kernels, pool, layer, places[i], tokens, x, flow);
        add_product(kernels, pool, flow.mixed, tokens.n_tokens, *layer.output.matrix, x, flow.after);
        shift(flow.after, layer.output, tokens.n_tokens);
        gate_up(kernels, pool, flow.after, tokens.n_tokens, layer.ffn_norm, *layer.gate, *layer.up, flow.inner);
        add_product(kernels, pool, flow.inner, tokens.n_tokens, *layer.down.matrix, flow.after, x);
        shift(x, layer.down, tokens.n_tokens);
    }
}

}  // namespace slm
