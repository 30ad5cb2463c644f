#include "latent.h"

#include <algorithm>

namespace slm {

namespace {

constexpr std::size_t task_values = 1 << 13;  // fewer are copied before a thread has heard of it

thread_local Scratch latent_scratch;  // of the thread that calls

struct Widths {
    std::size_t heads, nope, rotated, rank, low;
    std::size_t head() const { return rotated + rank; }
};

Widths widths_of(const Latent& layer) {
    const Matrix& up = *layer.k_up[0];
    return {layer.k_up.size(), up.n_in, layer.kv_down.matrix->n_out - up.n_out, up.n_out,
            layer.q_down.matrix ? layer.q_down.matrix->n_out : 0};
}

// Activations of a batch on their way.
struct Flow {
    float *low, *q, *kv, *nope, *latents, *queries, *keys, *found;
};

Flow flow_of(const Widths& w, std::size_t n) {
    const std::size_t sizes[] = {w.low, w.heads * (w.nope + w.rotated), w.head(), w.heads * w.nope, w.heads * w.rank,
                                 w.heads * w.head(), w.head(), w.heads * w.head()};
    std::size_t total = 0;
    for (std::size_t size : sizes) total += n * size;
    float* memory = latent_scratch.room<float>(total);
    float* at[std::size(sizes)];
    for (std::size_t i = 0; i < std::size(sizes); memory += n * sizes[i], ++i) at[i] = memory;
    return {at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7]};
}

// Columns of rows that lie some numbers apart.
struct Columns {
    const float* at;
    std::size_t stride, width;
};

// Those columns of n rows to rows that lie `stride` numbers apart.
void copy(Pool& pool, const Columns& from, std::size_t n, float* to, std::size_t stride) {
    const std::size_t step = std::max<std::size_t>(1, task_values / std::max<std::size_t>(1, from.width));
    pool.run((n + step - 1) / step, [&](std::size_t part) {
        for (std::size_t i = part * step; i < std::min(n, (part + 1) * step); ++i)
            std::copy_n(from.at + i * from.stride, from.width, to + i * stride);
    });
}

// Queries of all heads, unturned: what is to be turned, and what meets latents.
void make_queries(const IsaKernels& kernels, Pool& pool, const Latent& layer, const Widths& w, std::size_t n, const Flow& flow) {
    const std::size_t n_rows = n * w.heads, width = w.nope + w.rotated;
    if (layer.q_down.matrix) {
        const Made made{&layer.q, flow.q};
        project(kernels, pool, flow.low, n, layer.q_norm, {&made, 1});
    }
    copy(pool, {flow.q, width, w.nope}, n_rows, flow.nope, w.nope);
    multiply_by_head(kernels, pool, flow.nope, n, layer.k_up, flow.latents);
    copy(pool, {flow.q + w.nope, width, w.rotated}, n_rows, flow.queries, w.head());
    copy(pool, {flow.latents, w.rank, w.rank}, n_rows, flow.queries + w.rotated, w.head());
}

// The one key of each token, unturned; the latent lies before what is to be turned, and goes behind it.
void make_keys(const IsaKernels& kernels, const Latent& layer, const Widths& w, std::size_t n, const Flow& flow) {
    for (std::size_t t = 0; t < n; ++t) {
        const float* from = flow.kv + t * w.head();
        float* key = flow.keys + t * w.head();
        std::copy_n(from + w.rank, w.rotated, key);
        if (layer.kv_norm.weight) kernels.normalize(layer.kv_norm, from, 1, key + w.rotated);
        else std::copy_n(from, w.rank, key + w.rotated);
    }
}

}  // namespace

void attend_to_latents(const IsaKernels& kernels, Pool& pool, const Latent& layer, const Norm& norm, const Scoring& scoring,
                       const Place& place, const Tokens& tokens, const float* x, float* mixed) {
    const std::size_t n = tokens.n_tokens;
    const Widths w = widths_of(layer);
    const Flow flow = flow_of(w, n);
    const bool compressed = layer.q_down.matrix;
    const Made made[2] = {{compressed ? &layer.q_down : &layer.q, compressed ? flow.low : flow.q}, {&layer.kv_down, flow.kv}};
    project(kernels, pool, x, n, norm, made);
    make_queries(kernels, pool, layer, w, n, flow);
    make_keys(kernels, layer, w, n, flow);
    turn_heads(kernels, pool, flow.queries, n, w.heads, w.head(), {}, place.rotation, flow.queries);
    turn_heads(kernels, pool, flow.keys, n, 1, w.head(), {}, place.rotation, flow.keys);
    write(kernels, pool, *place.cache, n, tokens.pages, tokens.slots, flow.keys, flow.keys);
    attend(kernels, pool, *place.cache, *tokens.runs, scoring, w.heads, flow.queries, flow.found);
    copy(pool, {flow.found + w.rotated, w.head(), w.rank}, n * w.heads, flow.latents, w.rank);
    multiply_by_head(kernels, pool, flow.latents, n, layer.v_up, mixed);
}

}  // namespace slm
