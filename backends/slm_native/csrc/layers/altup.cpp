#include "layers/altup.h"

#include <algorithm>
#include <vector>

#include "parallel_rows.h"

namespace slm {

namespace {

// rows_scratch belongs to each computing thread, the others to the calling thread.
thread_local Scratch shares_scratch, added_scratch, low_scratch, rows_scratch;

// linear(tanh(router(x))) [T][n_out] of x [T][E]; in shares_scratch.
const float* shares_of(const IsaKernels& kernels, Pool& pool, const AltUp& altup, const Linear& linear, const float* x,
                       std::size_t n_tokens) {
    const std::size_t n = n_tokens * altup.router.matrix->n_out;
    float* modalities = shares_scratch.buffer<float>(n + n_tokens * linear.matrix->n_out);
    const Projection routed{&altup.router, modalities}, projection{&linear, modalities + n};
    project(kernels, pool, x, n_tokens, altup.router_norm, {&routed, 1});
    kernels.scan->curve(Curve::tanh, modalities, n);
    project(kernels, pool, modalities, n_tokens, {}, {&projection, 1});
    return projection.y;
}

// The contribution of the per-layer embedding [T][P] before its norm: [T][E]; in added_scratch. `gate` is the product
// with the gate's matrix.
float* layer_embedding_delta(const IsaKernels& kernels, Pool& pool, const LayerEmbedding& embedding,
                             const float* layer_inputs, Multiplication gate) {
    const std::size_t n_low = embedding.gate.matrix->n_out, width = embedding.project.matrix->n_out,
                      n_tokens = gate.n_rows;
    float *low = low_scratch.buffer<float>(n_tokens * n_low), *added = added_scratch.buffer<float>(n_tokens * width);
    const Projection projection{&embedding.project, added};
    gate.y = low;
    multiply_all(kernels, pool, {&gate, 1});
    finish(embedding.gate, low, n_tokens);
    activate(kernels, pool, low, layer_inputs, n_tokens * n_low, embedding.activation, low);
    project(kernels, pool, low, n_tokens, {}, {&projection, 1});
    return added;
}

// row += share * added.
void add(const IsaKernels& kernels, const float* added, std::size_t width, float share, float* row) {
    kernels.add_parts(row, &added, &share, 1, width, row);
}

void apply_pending_to(const IsaKernels& kernels, const ResidualStreams& streams, std::size_t t) {
    float* added = streams.pending + t * streams.width;
    if (streams.pending_norm.weight) kernels.normalize(streams.pending_norm, added, 1, added);
    for (std::size_t i = 1; i < streams.n; ++i)
        add(kernels, added, streams.width, 1.0f, streams[i] + t * streams.width);
}

// Rows of x times a scale, elementwise.
class ScaledRows final : public RowSource {
public:
    ScaledRows(const float* x, const float* scale, std::size_t width) : x_(x), scale_(scale), width_(width) {}
    void make(std::size_t i, float* to) const override {
        for (std::size_t e = 0; e < width_; ++e) to[e] = x_[i * width_ + e] * scale_[e];
    }

private:
    const float *x_, *scale_;
    std::size_t width_;
};

}  // namespace

void apply_pending(const IsaKernels& kernels, Pool& pool, ResidualStreams& streams) {
    if (!streams.pending) return;
    by_rows(pool, streams.n_tokens, streams.n * streams.width, [&](std::size_t begin, std::size_t end) {
        for (std::size_t t = begin; t < end; ++t) apply_pending_to(kernels, streams, t);
    });
    streams.pending = nullptr;
}

void predict(const IsaKernels& kernels, Pool& pool, const AltUp& altup, ResidualStreams& streams) {
    const std::size_t n = streams.n, width = streams.width;
    if (altup.active != 0) apply_pending(kernels, pool, streams);  // the first stream has nothing pending
    const float* shares = shares_of(kernels, pool, altup, altup.predict, streams[altup.active], streams.n_tokens);
    by_rows(pool, streams.n_tokens, n * n * width, [&](std::size_t begin, std::size_t end) {
        float* mixed = rows_scratch.buffer<float>(n * width);
        std::vector<const float*> rows(n);
        for (std::size_t t = begin; t < end; ++t) {
            if (streams.pending) apply_pending_to(kernels, streams, t);
            for (std::size_t i = 0; i < n; ++i) rows[i] = streams[i] + t * width;
            for (std::size_t i = 0; i < n; ++i)
                kernels.add_parts(rows[i], rows.data(), shares + (t * n + i) * n, n, width, mixed + i * width);
            for (std::size_t i = 0; i < n; ++i) std::copy_n(mixed + i * width, width, streams[i] + t * width);
        }
    });
    streams.pending = nullptr;
}

void correct(const IsaKernels& kernels, Pool& pool, const AltUp& altup, const LayerEmbedding& embedding,
             const float* layer_inputs, const float* layer_output, ResidualStreams& streams) {
    const std::size_t n = streams.n, n_tokens = streams.n_tokens, width = streams.width;
    const float* shares = shares_of(kernels, pool, altup, altup.correct, layer_output, n_tokens);
    by_rows(pool, n_tokens, n * width, [&](std::size_t begin, std::size_t end) {
        float* innovation = rows_scratch.buffer<float>(width);
        for (std::size_t t = begin; t < end; ++t) {
            const float* expected = streams[altup.active] + t * width;
            for (std::size_t e = 0; e < width; ++e) innovation[e] = layer_output[t * width + e] - expected[e];
            for (std::size_t i = 0; i < n; ++i)
                add(kernels, innovation, width, shares[t * n + i] + 1.0f, streams[i] + t * width);
        }
    });
    const ScaledRows read(streams[altup.active], altup.scale, width);
    streams.pending = layer_embedding_delta(kernels, pool, embedding, layer_inputs,
                                            {embedding.gate.matrix, nullptr, n_tokens, nullptr, nullptr, 0, 0, &read});
    streams.pending_norm = embedding.norm;
}

void split_layer_embeddings(const IsaKernels& kernels, Pool& pool, const float* projected, const float* looked_up,
                            const Norm& norm, const float (&shares)[2], std::size_t n_tokens, std::size_t n_parts,
                            float* y) {
    by_rows(pool, n_tokens, n_parts * norm.width, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin * n_parts; i < end * n_parts; ++i) {
            float* to = y + (i % n_parts * n_tokens + i / n_parts) * norm.width;
            kernels.normalize(norm, projected + i * norm.width, 1, to);
            const float* rows[] = {to, looked_up + i * norm.width};
            kernels.add_parts(nullptr, rows, shares, 2, norm.width, to);
        }
    });
}

void add_layer_embedding(const IsaKernels& kernels, Pool& pool, const LayerEmbedding& embedding,
                         const float* layer_inputs, std::size_t n_tokens, float* x) {
    float* added =
        layer_embedding_delta(kernels, pool, embedding, layer_inputs, {embedding.gate.matrix, x, n_tokens, nullptr});
    const std::size_t width = embedding.project.matrix->n_out;
    by_rows(pool, n_tokens, width, [&](std::size_t begin, std::size_t end) {
        for (std::size_t t = begin; t < end; ++t) {
            if (embedding.norm.weight) kernels.normalize(embedding.norm, added + t * width, 1, added + t * width);
            add(kernels, added + t * width, width, 1.0f, x + t * width);
        }
    });
}

}  // namespace slm
