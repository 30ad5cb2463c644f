#include "latent.h"

#include <algorithm>

#include "parts.h"

namespace slm {

namespace {

thread_local Scratch latent_scratch;  // of the thread that calls

struct Widths {
    std::size_t heads, nope, rotated, rank, low;
    std::size_t head() const { return rotated + rank; }
    std::size_t query() const { return nope + rotated; }
};

Widths widths_of(const Latent& layer) {
    const Matrix& up = *layer.k_up[0];
    return {layer.k_up.size(), up.n_in, layer.kv_down.matrix->n_out - up.n_out, up.n_out,
            layer.q_down.matrix ? layer.q_down.matrix->n_out : 0};
}

// Activations of a batch on their way.
struct Flow {
    float *low, *q, *kv, *queries, *keys, *found;
};

Flow flow_of(const Widths& w, std::size_t n) {
    const std::size_t sizes[] = {w.low, w.heads * w.query(), w.head(), w.heads * w.head(), w.head(), w.heads * w.head()};
    std::size_t total = 0;
    for (std::size_t size : sizes) total += n * size;
    float* memory = latent_scratch.room<float>(total);
    float* at[std::size(sizes)];
    for (std::size_t i = 0; i < std::size(sizes); memory += n * sizes[i], ++i) at[i] = memory;
    return {at[0], at[1], at[2], at[3], at[4], at[5]};
}

// Queries of all heads, but for what is to be turned, which lies before what meets latents.
void make_queries(const IsaKernels& kernels, Pool& pool, const Latent& layer, const Widths& w, std::size_t n, const Flow& flow) {
    if (layer.q_down.matrix) {
        const Made made{&layer.q, flow.q};
        project(kernels, pool, flow.low, n, layer.q_norm, {&made, 1});
    }
    multiply_by_head(kernels, pool, {flow.q, w.query()}, n, layer.k_up, flow.queries + w.rotated, w.head());
}

// The rest of a token's queries, and its key, both turned. In `kv` the latent lies before what is to be turned, in keys behind it.
void turn(const IsaKernels& kernels, const Latent& layer, const Widths& w, const Rotation& by, std::size_t t, const Flow& flow) {
    float *queries = flow.queries + t * w.heads * w.head(), *key = flow.keys + t * w.head();
    for (std::size_t head = 0; head < w.heads; ++head)
        std::copy_n(flow.q + (t * w.heads + head) * w.query() + w.nope, w.rotated, queries + head * w.head());
    const float* kv = flow.kv + t * w.head();
    std::copy_n(kv + w.rank, w.rotated, key);
    if (layer.kv_norm.weight) kernels.normalize(layer.kv_norm, kv, 1, key + w.rotated);
    else std::copy_n(kv, w.rank, key + w.rotated);
    if (by.half == 0) return;
    const float *cos = by.cos + t * by.half, *sin = by.sin + t * by.half;
    kernels.rotate(queries, w.heads, w.head(), cos, sin, by.half, by.interleaved);
    kernels.rotate(key, 1, w.head(), cos, sin, by.half, by.interleaved);
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
    by_rows(pool, n, w.heads * w.rotated + w.head(), [&](std::size_t begin, std::size_t end) {
        for (std::size_t t = begin; t < end; ++t) turn(kernels, layer, w, place.rotation, t, flow);
    });
    write(kernels, pool, *place.cache, n, tokens.pages, tokens.slots, flow.keys, flow.keys);
    attend(kernels, pool, *place.cache, *tokens.runs, scoring, w.heads, flow.queries, flow.found);
    multiply_by_head(kernels, pool, {flow.found + w.rotated, w.head()}, n, layer.v_up, mixed, layer.v_up[0]->n_out);
}

}  // namespace slm
