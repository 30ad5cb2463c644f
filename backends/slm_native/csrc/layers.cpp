#include "layers.h"

#include <algorithm>
#include <utility>

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

std::size_t n_out_of(const Linear& linear) { return linear.matrix ? linear.matrix->n_out : 0; }

Flow flow_of(std::span<const Layer> layers, std::size_t n_tokens) {
    const std::size_t n_q = widest(layers, [](const Layer& l) { return n_out_of(l.q); });
    const std::size_t n_kv = widest(layers, [](const Layer& l) { return n_out_of(l.k); });
    const std::size_t n_ff = widest(layers, [](const Layer& l) { return std::max(n_out_of(l.gating.up), n_out_of(l.left)); });
    const std::size_t width = n_out_of(layers[0].output);
    const std::size_t n_mixed = std::max(width, widest(layers, [](const Layer& l) { return l.output.matrix->n_in; }));
    float* memory = flow_scratch.room<float>(n_tokens * (n_q + 2 * n_kv + n_mixed + n_ff + width));
    const auto take = [&](std::size_t n) {
        float* taken = memory;
        memory += n_tokens * n;
        return taken;
    };
    return {take(n_q), take(n_kv), take(n_kv), take(n_mixed), take(n_ff), take(width)};
}

void limit(float* y, std::size_t n, float most) {
    for (std::size_t i = 0; i < n; ++i) y[i] = y[i] > most ? most : y[i] < -most ? -most : y[i];
}

// The queries of a batch, unturned; its keys and values go into the cache.
void project_heads(const IsaKernels& kernels, Pool& pool, const Layer& layer, const Place& place, const Tokens& tokens,
                   const float* x, const Flow& flow) {
    const KvLayer& cache = *place.cache;
    const std::size_t n = tokens.n_tokens, n_kv = n * n_out_of(layer.k);
    const Made made[3] = {{&layer.q, flow.q}, {&layer.k, flow.k}, {&layer.v, flow.v}};
    project(kernels, pool, x, n, layer.attn_norm, {made, layer.v.matrix ? 3u : layer.k.matrix ? 2u : 1u});
    if (!layer.v.matrix) std::copy_n(flow.k, n_kv, flow.v);
    if (layer.limit != 0.0f) {
        limit(flow.q, n * n_out_of(layer.q), layer.limit);
        limit(flow.k, n_kv, layer.limit), limit(flow.v, n_kv, layer.limit);
    }
    if (!layer.k.matrix) return;
    turn_heads(kernels, pool, flow.k, n, cache.n_kv_heads, cache.head_dim, layer.k_norm, place.rotation, flow.k);
    if (layer.v_norm.weight) turn_heads(kernels, pool, flow.v, n, cache.n_kv_heads, cache.head_dim, layer.v_norm, {}, flow.v);
    write(kernels, pool, cache, n, tokens.pages, tokens.slots, flow.k, flow.v);
}

void attend_in(const IsaKernels& kernels, Pool& pool, const Layer& layer, const Place& place, const Tokens& tokens, const float* x,
               const Flow& flow) {
    if (!layer.q.matrix) return attend_to_latents(kernels, pool, layer.latent, layer.attn_norm, layer.scoring, place, tokens, x, flow.mixed);
    const std::size_t n_heads = n_out_of(layer.q) / place.cache->head_dim;
    project_heads(kernels, pool, layer, place, tokens, x, flow);
    turn_heads(kernels, pool, flow.q, tokens.n_tokens, n_heads, place.cache->head_dim, layer.q_norm, place.rotation, flow.q);
    attend(kernels, pool, *place.cache, *tokens.runs, layer.scoring, n_heads, flow.q, flow.mixed);
}

// y = residual and what a branch of the layer makes of x at last.
void add_branch(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Linear& linear,
                const Norm& post_norm, float scale, const float* residual, float* y) {
    if (!post_norm.weight && scale == 1.0f) return add_product(kernels, pool, x, n_tokens, linear, residual, y);
    add_normed(kernels, pool, x, n_tokens, linear, post_norm, scale, residual, y);
}

// after = (after + what attention has read + what is made of it) / sqrt(2).
void add_learned(const IsaKernels& kernels, Pool& pool, const Layer& layer, std::size_t n_tokens, const float* x, const Flow& flow) {
    const std::size_t n = n_tokens * layer.right.matrix->n_out;
    float* read = flow.mixed;
    if (layer.attn_norm.weight) normalize(kernels, pool, x, n, layer.attn_norm, read);
    else std::copy_n(x, n, read);
    const Made low{&layer.left, flow.inner};
    project(kernels, pool, read, n_tokens, {}, {&low, 1});
    for (std::size_t i = 0; i < n; ++i) read[i] += flow.after[i];
    add_normed(kernels, pool, flow.inner, n_tokens, layer.right, layer.right_norm, 1.0f, read, flow.after);
    for (std::size_t i = 0; i < n; ++i) flow.after[i] *= 0.70710678f;
}

void keep_rows(float* x, std::size_t width, const std::vector<std::int64_t>& wanted) {
    for (std::size_t i = 0; i < wanted.size(); ++i)
        if (const std::size_t from = std::size_t(wanted[i]); from != i) std::copy_n(x + from * width, width, x + i * width);
}

}  // namespace

void run_layers(const IsaKernels& kernels, Pool& pool, std::span<const Layer> layers, std::span<const Place> places,
                const Tokens& tokens, const std::vector<std::int64_t>* wanted, float* x) {
    if (layers.empty() || tokens.n_tokens == 0) return;
    const Flow flow = flow_of(layers, tokens.n_tokens);
    const std::size_t width = n_out_of(layers[0].output);
    std::size_t n = tokens.n_tokens;
    for (std::size_t i = 0; i < layers.size(); ++i) {
        const Layer& layer = layers[i];
        attend_in(kernels, pool, layer, places[i], tokens, x, flow);
        if (wanted && i + 1 == layers.size()) {  // what follows is done token by token
            keep_rows(x, width, *wanted), keep_rows(flow.mixed, layer.output.matrix->n_in, *wanted);
            n = wanted->size();
        }
        add_branch(kernels, pool, flow.mixed, n, layer.output, layer.attn_post_norm, layer.residual_scale, x, flow.after);
        if (layer.left.matrix) add_learned(kernels, pool, layer, n, x, flow);
        if (!layer.gating.up.matrix) {
            std::copy_n(flow.after, n * width, x);
            continue;
        }
        gate_up(kernels, pool, layer.parallel ? x : flow.after, n, layer.ffn_norm, layer.gating, flow.inner);
        add_branch(kernels, pool, flow.inner, n, layer.down, layer.ffn_post_norm, layer.residual_scale, flow.after, x);
    }
}

}  // namespace slm
