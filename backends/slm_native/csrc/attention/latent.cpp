#include "attention/latent.h"

#include <algorithm>
#include <vector>

#include "matmul/embedding.h"
#include "parallel_rows.h"

namespace slm {

namespace {

// latent_scratch and values_scratch belong to the calling thread, key_scratch to each computing thread.
thread_local Scratch latent_scratch, values_scratch, key_scratch;

constexpr std::size_t most_values = std::size_t(1) << 21;  // 8 MiB of expanded values, but at least one head

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

// Activations of a batch between the steps.
struct Flow { float *low, *q, *kv, *queries, *keys, *attended; };

Flow flow_of(const Widths& w, std::size_t n) {
    const std::size_t sizes[] = {w.low,    w.heads * w.query(), w.head(), w.heads * w.head(),
                                 w.head(), w.heads * w.head()};
    std::size_t total = 0;
    for (std::size_t size : sizes) total += n * size;
    float* memory = latent_scratch.buffer<float>(total);
    float* at[std::size(sizes)];
    for (std::size_t i = 0; i < std::size(sizes); memory += n * sizes[i], ++i) at[i] = memory;
    return {at[0], at[1], at[2], at[3], at[4], at[5]};
}

// The operands of attention: latents, which are wide but need no expansion, or values (and keys) expanded per head.
enum class LatentPath { latents, expand_values, expand_keys_and_values };

// The path with the least work. Expanded heads fill lanes one head at a time; int8 products count a quarter.
LatentPath cheapest_path(const Latent& layer, const Widths& w, const std::vector<Run>& runs, std::size_t lanes) {
    const double rank = double(w.rank), nope = double(w.nope), width = double(w.head()),
                 result = double(layer.v_up[0]->n_out);
    double work[3] = {};
    for (const Run& run : runs) {
        const double n = double(run.n_tokens), n_held = double(run.n_held), visible = n_held - n / 2;
        const std::size_t padded = (run.n_tokens + lanes - 1) / lanes * lanes;
        const double rows = double(padded);
        work[0] += n * (2 * width * visible + rank * (nope + result) / 4);
        work[1] += rows * (width + result) * visible + n * rank * nope / 4 + n_held * rank * result / 4;
        work[2] += rows * (double(w.query()) + result) * visible + n_held * (rank * nope + rank * result / 4);
    }
    return LatentPath(std::min_element(work, work + 3) - work);
}

// Computes the queries of all heads. On the latent path, k_up maps them to latents; rotate_token adds the rotated part.
void make_queries(const IsaKernels& kernels, Pool& pool, const Latent& layer, const Widths& w, std::size_t n,
                  LatentPath path, const Flow& flow) {
    if (layer.q_down.matrix) {
        const Projection projection{&layer.q, flow.q};
        project(kernels, pool, flow.low, n, layer.q_norm, {&projection, 1});
    }
    if (path == LatentPath::expand_keys_and_values) return;
    multiply_per_head(kernels, pool, {flow.q, w.query()}, n, layer.k_up, flow.queries + w.rotated, w.head());
}

// The latents of a sequence's tokens, decoded from the cache.
class StoredLatents final : public RowSource {
public:
    StoredLatents(const IsaKernels& kernels, const KvLayer& cache, const Run& run, std::size_t rank)
        : kernels_(kernels), cache_(cache), run_(run), rank_(rank) {}
    void make(std::size_t i, float* to) const override {
        float* key = key_scratch.buffer<float>(cache_.head_dim);
        read(kernels_, cache_, run_.pages, i, 0, key);
        std::copy_n(key + cache_.head_dim - rank_, rank_, to);
    }

private:
    const IsaKernels& kernels_;
    const KvLayer& cache_;
    const Run& run_;
    std::size_t rank_;
};

// Transposes the matrices of some heads to [heads][N][C].
void transpose_matrices(Pool& pool, std::span<const Matrix* const> matrices, float* to) {
    constexpr std::size_t at_once = 16;  // rows: one cache line of each column
    pool.run(matrices.size(), [&](std::size_t i) {
        const Matrix& m = *matrices[i];
        float *rows = key_scratch.buffer<float>(at_once * m.n_in), *transposed = to + i * m.n_out * m.n_in;
        for (std::size_t first = 0; first < m.n_out; first += at_once) {
            const std::size_t n = std::min(at_once, m.n_out - first);
            for (std::size_t k = 0; k < n; ++k) embed_row(m, first + k, rows + k * m.n_in);
            for (std::size_t j = 0; j < m.n_in; ++j)
                for (std::size_t k = 0; k < n; ++k) transposed[j * m.n_out + first + k] = rows[k * m.n_in + j];
        }
    });
}

const FloatKernels* float32_of(const IsaKernels& kernels) {
    return std::find_if(kernels.floats, kernels.floats + kernels.n_floats,
                        [](const FloatKernels& one) { return one.type == 0; });
}

// Expands the latents of a sequence to values, and keys, of some heads.
class LatentExpansion {
public:
    LatentExpansion(const IsaKernels& kernels, Pool& pool, const Latent& layer, const Widths& w, const KvLayer& cache,
                    const Run& run, bool has_keys)
        : kernels_(kernels), pool_(pool), layer_(layer), w_(w), cache_(cache), run_(run), has_keys_(has_keys),
          n_values_(run.n_held * layer.v_up[0]->n_out), n_keys_(has_keys ? run.n_held * w.query() : 0),
          n_matrix_(has_keys ? w.nope * w.rank : 0) {
        n_heads_ = std::clamp<std::size_t>(most_values / (n_values_ + n_keys_), 1, w.heads);
        values_ = values_scratch.buffer<float>(n_heads_ * (n_values_ + n_keys_ + n_matrix_));
        keys_ = values_ + n_heads_ * n_values_, matrices_ = keys_ + n_heads_ * n_keys_;
    }

    // The number of heads from `first` on that fit in the buffer.
    ExpandedHeads make(std::size_t first) {
        const std::size_t n = std::min(n_heads_, w_.heads - first), width = layer_.v_up[0]->n_out;
        const StoredLatents latents(kernels_, cache_, run_, w_.rank);
        std::vector<Multiplication> products;
        products.reserve(2 * n);
        for (std::size_t i = 0; i < n; ++i)
            products.push_back(
                {layer_.v_up[first + i], nullptr, run_.n_held, values_ + i * n_values_, nullptr, 0, 0, &latents});
        std::vector<Matrix> transposed(n);
        if (has_keys_) transpose_matrices(pool_, layer_.k_up.subspan(first, n), matrices_);
        for (std::size_t i = 0; has_keys_ && i < n; ++i) {
            const auto* data = reinterpret_cast<const std::uint8_t*>(matrices_ + i * n_matrix_);
            transposed[i] = {nullptr, float32_of(kernels_), data, w_.nope, w_.rank, w_.rank * sizeof(float)};
            products.push_back(
                {&transposed[i], nullptr, run_.n_held, keys_ + i * n_keys_, nullptr, 0, w_.query(), &latents});
        }
        multiply_all(kernels_, pool_, products);
        if (has_keys_) put_rotated(n);
        return {has_keys_ ? keys_ : nullptr, values_, first, n, w_.query(), width};
    }

private:
    // All heads share the rotated part of a key, which comes after the rest.
    void put_rotated(std::size_t n_heads) {
        by_rows(pool_, run_.n_held, w_.head() + n_heads * w_.rotated, [&](std::size_t begin, std::size_t end) {
            float* key = key_scratch.buffer<float>(w_.head());
            for (std::size_t t = begin; t < end; ++t) {
                read(kernels_, cache_, run_.pages, t, 0, key);
                for (std::size_t i = 0; i < n_heads; ++i)
                    std::copy_n(key, w_.rotated, keys_ + i * n_keys_ + t * w_.query() + w_.nope);
            }
        });
    }

    const IsaKernels& kernels_;
    Pool& pool_;
    const Latent& layer_;
    const Widths& w_;
    const KvLayer& cache_;
    const Run& run_;
    bool has_keys_;
    std::size_t n_values_, n_keys_, n_matrix_, n_heads_;  // per head; n_heads_: heads expanded at once
    float *values_, *keys_, *matrices_;
};

// Rotates the rotary part of a token's queries and key. It comes after the latent in `kv`, but before it in keys.
void rotate_token(const IsaKernels& kernels, const Latent& layer, const Widths& w, const Rotation& by, std::size_t t,
                  LatentPath path, const Flow& flow) {
    const bool is_query_final = path == LatentPath::expand_keys_and_values;
    float *rotary = flow.q + t * w.heads * w.query() + w.nope, *key = flow.keys + t * w.head();
    float* queries = is_query_final ? rotary : flow.queries + t * w.heads * w.head();
    for (std::size_t head = 0; !is_query_final && head < w.heads; ++head)
        std::copy_n(rotary + head * w.query(), w.rotated, queries + head * w.head());
    const float* kv = flow.kv + t * w.head();
    std::copy_n(kv + w.rank, w.rotated, key);
    if (layer.kv_norm.weight) kernels.normalize(layer.kv_norm, kv, 1, key + w.rotated);
    else std::copy_n(kv, w.rank, key + w.rotated);
    if (by.half == 0) return;
    const float *cos = by.cos + t * by.half, *sin = by.sin + t * by.half;
    kernels.rotate(queries, w.heads, is_query_final ? w.query() : w.head(), cos, sin, by.half, by.interleaved);
    kernels.rotate(key, 1, w.head(), cos, sin, by.half, by.interleaved);
}

void attend_expanded_latents(const IsaKernels& kernels, Pool& pool, const Latent& layer, const Widths& w,
                             const Scoring& scoring, const KvLayer& cache, const std::vector<Run>& runs,
                             LatentPath path, const Flow& flow, float* mixed) {
    const bool has_keys = path == LatentPath::expand_keys_and_values;
    for (const Run& run : runs) {
        LatentExpansion heads(kernels, pool, layer, w, cache, run, has_keys);
        for (std::size_t first = 0; first < w.heads;) {
            const ExpandedHeads expanded = heads.make(first);
            attend_expanded(kernels, pool, cache, run, scoring, w.heads, has_keys ? flow.q : flow.queries, expanded,
                            mixed);
            first += expanded.n_heads;
        }
    }
}

}  // namespace

void attend_to_latents(const IsaKernels& kernels, Pool& pool, const Latent& layer, const Norm& norm,
                       const Scoring& scoring, const LayerInputs& inputs, const Tokens& tokens, const float* x,
                       float* mixed) {
    const std::size_t n = tokens.n_tokens;
    const Widths w = widths_of(layer);
    const Flow flow = flow_of(w, n);
    const bool compressed = layer.q_down.matrix;
    const Projection projections[2] = {{compressed ? &layer.q_down : &layer.q, compressed ? flow.low : flow.q},
                                       {&layer.kv_down, flow.kv}};
    project(kernels, pool, x, n, norm, projections);
    const LatentPath path = cheapest_path(layer, w, *tokens.runs, std::size_t(kernels.lanes));
    make_queries(kernels, pool, layer, w, n, path, flow);
    by_rows(pool, n, w.heads * w.rotated + w.head(), [&](std::size_t begin, std::size_t end) {
        for (std::size_t t = begin; t < end; ++t) rotate_token(kernels, layer, w, inputs.rotation, t, path, flow);
    });
    write(kernels, pool, *inputs.cache, n, tokens.pages, tokens.slots, flow.keys, flow.keys);
    if (path != LatentPath::latents)
        return attend_expanded_latents(kernels, pool, layer, w, scoring, *inputs.cache, *tokens.runs, path, flow,
                                       mixed);
    attend(kernels, pool, *inputs.cache, *tokens.runs, scoring, w.heads, flow.queries, flow.attended);
    multiply_per_head(kernels, pool, {flow.attended + w.rotated, w.head()}, n, layer.v_up, mixed, layer.v_up[0]->n_out);
}

}  // namespace slm
