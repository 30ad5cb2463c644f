#include "layers/layers.h"

#include <algorithm>
#include <utility>

#include "parallel_rows.h"

namespace slm {

namespace {

thread_local Scratch flow_scratch;

// Activations of a batch between the steps of a layer. Only LAuReL uses `read`, the normalized input of attention, and
// `low`, its low-rank projection.
struct Flow { float *q, *k, *v, *mixed, *inner, *after, *output, *read, *low; };

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
    const std::size_t n_ff =
        widest(layers, [](const Layer& l) { return std::max(n_out_of(l.gating.up), n_out_of(l.embedding.gate)); });
    const std::size_t n_low = widest(layers, [](const Layer& l) { return n_out_of(l.left); });
    const std::size_t width = n_out_of(layers[0].output);
    const std::size_t n_mixed = std::max(width, widest(layers, [](const Layer& l) { return l.output.matrix->n_in; }));
    const std::size_t n_read = n_low ? width : 0;
    float* memory =
        flow_scratch.buffer<float>(n_tokens * (n_q + 2 * n_kv + n_mixed + n_ff + 2 * width + n_read + n_low));
    const auto take = [&](std::size_t n) {
        float* taken = memory;
        memory += n_tokens * n;
        return taken;
    };
    return {take(n_q),   take(n_kv),  take(n_kv),   take(n_mixed), take(n_ff),
            take(width), take(width), take(n_read), take(n_low)};
}

void limit(float* y, std::size_t n, float most) {
    for (std::size_t i = 0; i < n; ++i) y[i] = y[i] > most ? most : y[i] < -most ? -most : y[i];
}

// Computes queries before RoPE, and writes keys and values to the cache.
void project_heads(const IsaKernels& kernels, Pool& pool, const Layer& layer, const LayerInputs& inputs,
                   const Tokens& tokens, const float* x, const Flow& flow) {
    const KvLayer& cache = *inputs.cache;
    const std::size_t n = tokens.n_tokens, n_kv = n * n_out_of(layer.k);
    Projection projections[4];
    std::size_t n_projections = 0;
    for (const Projection& one : {Projection{&layer.q, flow.q}, Projection{&layer.k, flow.k},
                                  Projection{&layer.v, flow.v}, Projection{&layer.left, flow.low}})
        if (one.linear->matrix) projections[n_projections++] = one;
    const bool stores_normed = layer.left.matrix && layer.attn_norm.weight;
    if (stores_normed) normalize(kernels, pool, x, n * layer.attn_norm.width, layer.attn_norm, flow.read);
    project(kernels, pool, stores_normed ? flow.read : x, n, stores_normed ? Norm{} : layer.attn_norm,
            {projections, n_projections});
    if (!layer.v.matrix) std::copy_n(flow.k, n_kv, flow.v);
    if (layer.limit != 0.0f) {
        limit(flow.q, n * n_out_of(layer.q), layer.limit);
        limit(flow.k, n_kv, layer.limit), limit(flow.v, n_kv, layer.limit);
    }
    if (!layer.k.matrix) return;
    rotate_heads(kernels, pool, flow.k, n, cache.n_kv_heads, cache.head_dim, layer.k_norm, inputs.rotation, flow.k);
    if (layer.v_norm.weight)
        rotate_heads(kernels, pool, flow.v, n, cache.n_kv_heads, cache.head_dim, layer.v_norm, {}, flow.v);
    write(kernels, pool, cache, n, tokens.pages, tokens.slots, flow.k, flow.v);
}

void attend_in(const IsaKernels& kernels, Pool& pool, const Layer& layer, const LayerInputs& inputs,
               const Tokens& tokens, const float* x, const Flow& flow) {
    if (!layer.q.matrix)
        return attend_to_latents(kernels, pool, layer.latent, layer.attn_norm, layer.scoring, inputs, tokens, x,
                                 flow.mixed);
    const std::size_t n_heads = n_out_of(layer.q) / inputs.cache->head_dim;
    project_heads(kernels, pool, layer, inputs, tokens, x, flow);
    rotate_heads(kernels, pool, flow.q, tokens.n_tokens, n_heads, inputs.cache->head_dim, layer.q_norm, inputs.rotation,
                 flow.q);
    attend(kernels, pool, *inputs.cache, *tokens.runs, layer.scoring, n_heads, flow.q, flow.mixed);
}

// y = residual + the output projection of a branch, after norm and scale.
void add_branch(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Linear& linear,
                const Norm& post_norm, float scale, const float* residual, float* y) {
    if (!post_norm.weight && scale == 1.0f) return add_product(kernels, pool, x, n_tokens, linear, residual, y);
    add_normed(kernels, pool, x, n_tokens, linear, post_norm, scale, residual, y);
}

// after = (after + input of attention + LAuReL(input of attention)) / sqrt(2).
void add_laurel(const IsaKernels& kernels, Pool& pool, const Layer& layer, std::size_t n_tokens, const float* read,
                const Flow& flow) {
    const std::size_t width = layer.right.matrix->n_out;
    const Projection projection{&layer.right, flow.output};
    project(kernels, pool, flow.low, n_tokens, {}, {&projection, 1});
    by_rows(pool, n_tokens, 3 * width, [&](std::size_t begin, std::size_t end) {
        const float whole[] = {1.0f, 1.0f}, part = 0.70710678f;
        for (std::size_t t = begin; t < end; ++t) {
            float *after = flow.after + t * width, *low = flow.output + t * width;
            if (layer.right_norm.weight) kernels.normalize(layer.right_norm, low, 1, low);
            const float *parts[] = {read + t * width, low}, *sum = after;
            kernels.add_parts(after, parts, whole, 2, width, after);
            kernels.add_parts(nullptr, &sum, &part, 1, width, after);
        }
    });
}

void scale(const IsaKernels& kernels, Pool& pool, float by, std::size_t n_tokens, std::size_t width, float* x) {
    by_rows(pool, n_tokens, width, [&](std::size_t begin, std::size_t end) {
        const float* rows = x + begin * width;
        kernels.add_parts(nullptr, &rows, &by, 1, (end - begin) * width, x + begin * width);
    });
}

void keep_rows(float* x, std::size_t width, const std::vector<std::int64_t>& output_tokens) {
    for (std::size_t i = 0; i < output_tokens.size(); ++i)
        if (const std::size_t from = std::size_t(output_tokens[i]); from != i)
            std::copy_n(x + from * width, width, x + i * width);
}

// to = after + feed_forward(after), or + feed_forward(x) for parallel layers.
void feed_forward(const IsaKernels& kernels, Pool& pool, const Layer& layer, std::size_t n_tokens, const float* x,
                  const Flow& flow, float* to) {
    const float* read = layer.parallel ? x : flow.after;
    if (layer.gating.up.matrix) {
        gate_up(kernels, pool, read, n_tokens, layer.ffn_norm, layer.gating, flow.inner);
        add_branch(kernels, pool, flow.inner, n_tokens, layer.down, layer.ffn_post_norm, layer.residual_scale,
                   flow.after, to);
    } else if (layer.moe) {
        run_moe(kernels, pool, *layer.moe, read, nullptr, n_tokens, layer.ffn_norm,
                {layer.ffn_post_norm, layer.residual_scale, flow.after}, to);
    } else {
        std::copy_n(flow.after, n_tokens * n_out_of(layer.output), to);
    }
}

// Everything after attention except AltUp and per-layer embeddings: output projection, residuals, feed-forward layer.
// x [n_tokens][E] is the input of the layer; `to` may be x.
void after_attention(const IsaKernels& kernels, Pool& pool, const Layer& layer, std::size_t n_tokens, const float* x,
                     const Flow& flow, float* to) {
    add_branch(kernels, pool, flow.mixed, n_tokens, layer.output, layer.attn_post_norm, layer.residual_scale, x,
               flow.after);
    if (layer.left.matrix) add_laurel(kernels, pool, layer, n_tokens, layer.attn_norm.weight ? flow.read : x, flow);
    feed_forward(kernels, pool, layer, n_tokens, x, flow, to);
}

// Keeps only the rows of output_tokens in the streams and in attention's result.
void keep_output_tokens(const Layer& layer, const std::vector<std::int64_t>& output_tokens, const Flow& flow,
                        ResidualStreams& streams) {
    for (std::size_t k = 0; k < streams.n; ++k) keep_rows(streams[k], streams.width, output_tokens);
    keep_rows(flow.mixed, layer.output.matrix->n_in, output_tokens);
    if (layer.left.matrix && layer.attn_norm.weight) keep_rows(flow.read, streams.width, output_tokens);
    if (layer.left.matrix) keep_rows(flow.low, n_out_of(layer.left), output_tokens);
    streams.n_tokens = output_tokens.size();
}

// The per-layer embeddings of the remaining tokens.
const float* embedding_of(const Layer& layer, const LayerInputs& inputs, const std::vector<std::int64_t>* output_tokens,
                          const Flow& flow) {
    if (!output_tokens || !layer.embedding.gate.matrix) return inputs.embedding;
    const std::size_t width = n_out_of(layer.embedding.gate);
    for (std::size_t i = 0; i < output_tokens->size(); ++i)
        std::copy_n(inputs.embedding + std::size_t((*output_tokens)[i]) * width, width, flow.inner + i * width);
    return flow.inner;
}

}  // namespace

void run_layers(const IsaKernels& kernels, Pool& pool, std::span<const Layer> layers,
                std::span<const LayerInputs> inputs, const Tokens& tokens,
                const std::vector<std::int64_t>* output_tokens, std::size_t n_streams, float* x) {
    if (layers.empty() || tokens.n_tokens == 0) return;
    const Flow flow = flow_of(layers, tokens.n_tokens);
    const std::size_t width = n_out_of(layers[0].output);
    ResidualStreams streams{x, n_streams, tokens.n_tokens * width, tokens.n_tokens, width};
    for (std::size_t i = 0; i < layers.size(); ++i) {
        const Layer& layer = layers[i];
        const bool has_streams = layer.altup.router.matrix;
        // After the last attention, tokens are independent: only the outputs are computed.
        const auto* outputs = i + 1 == layers.size() ? output_tokens : nullptr;
        if (has_streams) predict(kernels, pool, layer.altup, streams);
        float *at = has_streams ? streams[layer.altup.active] : x, *output = has_streams ? flow.output : x;
        attend_in(kernels, pool, layer, inputs[i], tokens, at, flow);
        if (outputs) keep_output_tokens(layer, *outputs, flow, streams);
        if (streams.n_tokens == 0) return;
        after_attention(kernels, pool, layer, streams.n_tokens, at, flow, output);
        const float* layer_inputs = embedding_of(layer, inputs[i], outputs, flow);
        if (has_streams) correct(kernels, pool, layer.altup, layer.embedding, layer_inputs, output, streams);
        else if (layer.embedding.gate.matrix)
            add_layer_embedding(kernels, pool, layer.embedding, layer_inputs, streams.n_tokens, x);
        if (layer.output_scale != 1.0f) scale(kernels, pool, layer.output_scale, streams.n_tokens, width, x);
    }
    apply_pending(kernels, pool, streams);
    const std::size_t n_left = streams.n_tokens * width;
    for (std::size_t k = 1; n_left < streams.stride && k < n_streams; ++k)
        std::copy_n(streams[k], n_left, x + k * n_left);
}

}  // namespace slm
