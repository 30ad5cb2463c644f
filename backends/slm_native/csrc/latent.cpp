#include "latent.h"

#include <algorithm>
#include <vector>

#include "parts.h"

namespace slm {

namespace {

// Of the thread that calls, and of whoever computes.
thread_local Scratch latent_scratch, values_scratch, key_scratch;

constexpr std::size_t most_values = std::size_t(1) << 21;  // at once, but for those of one head: 8 MiB

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

// Latents of the tokens that a sequence holds, as they are stored.
class HeldLatents final : public RowSource {
public:
    HeldLatents(const IsaKernels& kernels, const KvLayer& cache, const Run& run, std::size_t rank)
        : kernels_(kernels), cache_(cache), run_(run), rank_(rank) {}
    void make(std::size_t i, float* to) const override {
        float* key = key_scratch.room<float>(cache_.head_dim);
        read(kernels_, cache_, run_.pages, i, 0, key);
        std::copy_n(key + cache_.head_dim - rank_, rank_, to);
    }

private:
    const IsaKernels& kernels_;
    const KvLayer& cache_;
    const Run& run_;
    std::size_t rank_;
};

// Whether it takes less to make values of each head of all that a batch's sequences hold, and mix those, than to mix
// latents and make results of each head of the mixed ones. Queries with values of their heads fill lanes head by head.
bool makes_values(const Latent& layer, const Widths& w, const std::vector<Run>& runs, std::size_t lanes) {
    const double result = double(layer.v_up[0]->n_out), width = double(w.head());
    const double product = double(w.rank) * result / 4;  // of codes, four at once
    double with_latents = 0, with_values = 0;
    for (const Run& run : runs) {
        const double n = double(run.n_tokens), held = double(run.n_held), seen = held - n / 2;
        const double rows = double((run.n_tokens + lanes - 1) / lanes * lanes);
        with_latents += n * (2 * width * seen + product);
        with_values += rows * (width + result) * seen + held * product;
    }
    return with_values < with_latents;
}

// `mixed` of one sequence, some heads at a time: values of all it holds are many.
void attend_with_values(const IsaKernels& kernels, Pool& pool, const Latent& layer, const Widths& w, const Scoring& scoring,
                        const KvLayer& cache, const Run& run, const float* queries, float* mixed) {
    const HeldLatents latents(kernels, cache, run, w.rank);
    const std::size_t width = layer.v_up[0]->n_out, a_head = run.n_held * width;
    const std::size_t at_once = std::clamp<std::size_t>(most_values / a_head, 1, w.heads);
    float* values = values_scratch.room<float>(std::min(at_once, w.heads) * a_head);
    for (std::size_t first = 0; first < w.heads; first += at_once) {
        const std::size_t n = std::min(at_once, w.heads - first);
        std::vector<Multiplication> products;
        for (std::size_t i = 0; i < n; ++i)
            products.push_back({layer.v_up[first + i], nullptr, run.n_held, values + i * a_head, nullptr, 0, 0, &latents});
        multiply_all(kernels, pool, products);
        attend_with(kernels, pool, cache, run, scoring, w.heads, queries, {values, first, n, width}, mixed);
    }
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
    if (makes_values(layer, w, *tokens.runs, std::size_t(kernels.lanes))) {
        for (const Run& run : *tokens.runs)
            attend_with_values(kernels, pool, layer, w, scoring, *place.cache, run, flow.queries, mixed);
        return;
    }
    attend(kernels, pool, *place.cache, *tokens.runs, scoring, w.heads, flow.queries, flow.found);
    multiply_by_head(kernels, pool, {flow.found + w.rotated, w.head()}, n, layer.v_up, mixed, layer.v_up[0]->n_out);
}

}  // namespace slm
