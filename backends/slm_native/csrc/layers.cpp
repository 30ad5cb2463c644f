#include "layers.h"

#include <algorithm>
#include <utility>

namespace slm {

namespace {

thread_local Scratch flow_scratch;

// Activations of a batch between the steps of a layer.
struct Flow {
    float *q, *k, *v, *mixed, *inner, *after, *made;
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
    const std::size_t n_ff = widest(layers, [](const Layer& l) { return std::max({n_out_of(l.gating.up), n_out_of(l.left), n_out_of(l.embedding.gate)}); });
    const std::size_t width = n_out_of(layers[0].output);
    const std::size_t n_mixed = std::max(width, widest(layers, [](const Layer& l) { return l.output.matrix->n_in; }));
    float* memory = flow_scratch.room<float>(n_tokens * (n_q + 2 * n_kv + n_mixed + n_ff + 2 * width));
    const auto take = [&](std::size_t n) {
        float* taken = memory;
        memory += n_tokens * n;
        return taken;
    };
    return {take(n_q), take(n_kv), take(n_kv), take(n_mixed), take(n_ff), take(width), take(width)};
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

// x = after and what the feed-forward layer makes of it, or of x.
void feed_forward(const IsaKernels& kernels, Pool& pool, const Layer& layer, std::size_t n_tokens, const Flow& flow, float* x) {
    const std::size_t n = n_tokens * n_out_of(layer.output);
    const float* read = layer.parallel ? x : flow.after;
    if (layer.gating.up.matrix) {
        gate_up(kernels, pool, read, n_tokens, layer.ffn_norm, layer.gating, flow.inner);
        add_branch(kernels, pool, flow.inner, n_tokens, layer.down, layer.ffn_post_norm, layer.residual_scale, flow.after, x);
    } else if (layer.mixture) {
        mix(kernels, pool, *layer.mixture, read, nullptr, n_tokens, layer.ffn_norm, flow.mixed);
        if (layer.ffn_post_norm.weight) normalize(kernels, pool, flow.mixed, n, layer.ffn_post_norm, flow.mixed);
        for (std::size_t i = 0; i < n; ++i) x[i] = flow.after[i] + layer.residual_scale * flow.mixed[i];
    } else {
        std::copy_n(flow.after, n, x);
    }
}

// x [n_tokens][E] through a layer, in place, but for what lies around it; of the tokens `wanted`, where it is not null.
void run_layer(const IsaKernels& kernels, Pool& pool, const Layer& layer, const Place& place, const Tokens& tokens,
               const std::vector<std::int64_t>* wanted, const Flow& flow, float* x) {
    attend_in(kernels, pool, layer, place, tokens, x, flow);
    if (wanted) keep_rows(x, n_out_of(layer.output), *wanted), keep_rows(flow.mixed, layer.output.matrix->n_in, *wanted);
    const std::size_t n = wanted ? wanted->size() : tokens.n_tokens;
    if (n == 0) return;
    add_branch(kernels, pool, flow.mixed, n, layer.output, layer.attn_post_norm, layer.residual_scale, x, flow.after);
    if (layer.left.matrix) add_learned(kernels, pool, layer, n, x, flow);
    feed_forward(kernels, pool, layer, n, flow, x);
}

// The layer's own embedding of the tokens that are left.
const float* own_of(const Layer& layer, const Place& place, const std::vector<std::int64_t>* wanted, const Flow& flow) {
    if (!wanted || !layer.embedding.gate.matrix) return place.own;
    const std::size_t width = n_out_of(layer.embedding.gate);
    for (std::size_t i = 0; i < wanted->size(); ++i)
        std::copy_n(place.own + std::size_t((*wanted)[i]) * width, width, flow.inner + i * width);
    return flow.inner;
}

}  // namespace

void run_layers(const IsaKernels& kernels, Pool& pool, std::span<const Layer> layers, std::span<const Place> places,
                const Tokens& tokens, const std::vector<std::int64_t>* wanted, std::size_t n_streams, float* x) {
    if (layers.empty() || tokens.n_tokens == 0) return;
    const Flow flow = flow_of(layers, tokens.n_tokens);
    const std::size_t width = n_out_of(layers[0].output);
    Streams streams{x, n_streams, tokens.n_tokens * width, tokens.n_tokens, width};
    for (std::size_t i = 0; i < layers.size(); ++i) {
        const Layer& layer = layers[i];
        const bool has_streams = layer.altup.router.matrix;
        const auto* kept = i + 1 == layers.size() ? wanted : nullptr;  // what follows attention is done token by token
        float* at = has_streams ? flow.made : x;
        if (has_streams) {
            predict(kernels, pool, layer.altup, streams);
            std::copy_n(streams[layer.altup.active], streams.n_tokens * width, at);
        }
        run_layer(kernels, pool, layer, places[i], tokens, kept, flow, at);
        if (kept) {
            for (std::size_t k = 0; has_streams && k < n_streams; ++k) keep_rows(streams[k], width, *kept);
            streams.n_tokens = kept->size();
        }
        const float* own = own_of(layer, places[i], kept, flow);
        if (has_streams) correct(kernels, pool, layer.altup, layer.embedding, own, at, streams);
        else if (layer.embedding.gate.matrix) let_in(kernels, pool, layer.embedding, own, streams.n_tokens, x);
        for (std::size_t k = 0; layer.output_scale != 1.0f && k < streams.n_tokens * width; ++k) x[k] *= layer.output_scale;
    }
    const std::size_t left = streams.n_tokens * width;
    for (std::size_t k = 1; left < streams.stride && k < n_streams; ++k) std::copy_n(streams[k], left, x + k * left);
}

}  // namespace slm
