#include "streams.h"

#include <algorithm>
#include <vector>

#include "parts.h"

namespace slm {

namespace {

// Of the thread that calls, and of whoever computes.
thread_local Scratch shares_scratch, read_scratch, added_scratch, low_scratch, rows_scratch;

// What a linear makes of what the router makes of x [T][E], from -1 to 1: [T][n_out]; in shares_scratch.
const float* shares_of(const IsaKernels& kernels, Pool& pool, const AltUp& altup, const Linear& linear, const float* x,
                       std::size_t n_tokens) {
    const std::size_t n = n_tokens * altup.router.matrix->n_out;
    float* modalities = shares_scratch.room<float>(n + n_tokens * linear.matrix->n_out);
    const Made routed{&altup.router, modalities}, made{&linear, modalities + n};
    project(kernels, pool, x, n_tokens, altup.router_norm, {&routed, 1});
    kernels.scan->curve(Curve::tanh, modalities, n);
    project(kernels, pool, modalities, n_tokens, {}, {&made, 1});
    return made.y;
}

// What a layer's own embedding [T][P] adds to x [T][E], but for its norm: [T][E]; in added_scratch.
float* added_by(const IsaKernels& kernels, Pool& pool, const LayerEmbedding& embedding, const float* own, const float* x,
                std::size_t n_tokens) {
    const std::size_t n_low = embedding.gate.matrix->n_out, width = embedding.project.matrix->n_out;
    float *low = low_scratch.room<float>(n_tokens * n_low), *added = added_scratch.room<float>(n_tokens * width);
    const Made gate{&embedding.gate, low}, made{&embedding.project, added};
    project(kernels, pool, x, n_tokens, {}, {&gate, 1});
    activate(kernels, pool, low, own, n_tokens * n_low, embedding.activation, low);
    project(kernels, pool, low, n_tokens, {}, {&made, 1});
    return added;
}

// row += what is added to it.
void add(const IsaKernels& kernels, const float* added, std::size_t width, float share, float* row) {
    kernels.add_parts(row, &added, &share, 1, width, row);
}

}  // namespace

void predict(const IsaKernels& kernels, Pool& pool, const AltUp& altup, const Streams& streams) {
    const std::size_t n = streams.n, width = streams.width;
    const float* shares = shares_of(kernels, pool, altup, altup.predict, streams[altup.active], streams.n_tokens);
    by_rows(pool, streams.n_tokens, n * n * width, [&](std::size_t begin, std::size_t end) {
        float* mixed = rows_scratch.room<float>(n * width);
        std::vector<const float*> rows(n);
        for (std::size_t t = begin; t < end; ++t) {
            for (std::size_t i = 0; i < n; ++i) rows[i] = streams[i] + t * width;
            for (std::size_t i = 0; i < n; ++i)
                kernels.add_parts(rows[i], rows.data(), shares + (t * n + i) * n, n, width, mixed + i * width);
            for (std::size_t i = 0; i < n; ++i) std::copy_n(mixed + i * width, width, streams[i] + t * width);
        }
    });
}

void correct(const IsaKernels& kernels, Pool& pool, const AltUp& altup, const LayerEmbedding& embedding, const float* own,
             const float* made, const Streams& streams) {
    const std::size_t n = streams.n, n_tokens = streams.n_tokens, width = streams.width;
    const float* shares = shares_of(kernels, pool, altup, altup.correct, made, n_tokens);
    float* read = read_scratch.room<float>(n_tokens * width);  // what the embedding's gate reads
    by_rows(pool, n_tokens, n * width, [&](std::size_t begin, std::size_t end) {
        float* news = rows_scratch.room<float>(width);
        for (std::size_t t = begin; t < end; ++t) {
            const float* expected = streams[altup.active] + t * width;
            for (std::size_t e = 0; e < width; ++e) news[e] = made[t * width + e] - expected[e];
            for (std::size_t i = 0; i < n; ++i) add(kernels, news, width, shares[t * n + i] + 1.0f, streams[i] + t * width);
            for (std::size_t e = 0; e < width; ++e) read[t * width + e] = expected[e] * altup.scale[e];
        }
    });
    float* added = added_by(kernels, pool, embedding, own, read, n_tokens);
    by_rows(pool, n_tokens, n * width, [&](std::size_t begin, std::size_t end) {
        for (std::size_t t = begin; t < end; ++t) {
            if (embedding.norm.weight) kernels.normalize(embedding.norm, added + t * width, 1, added + t * width);
            for (std::size_t i = 1; i < n; ++i) add(kernels, added + t * width, width, 1.0f, streams[i] + t * width);
        }
    });
}

void part_embeddings(const IsaKernels& kernels, Pool& pool, const float* made, const float* given, const Norm& norm, const float (&shares)[2],
                     std::size_t n_tokens, std::size_t n_parts, float* y) {
    by_rows(pool, n_tokens, n_parts * norm.width, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin * n_parts; i < end * n_parts; ++i) {
            float* to = y + (i % n_parts * n_tokens + i / n_parts) * norm.width;
            kernels.normalize(norm, made + i * norm.width, 1, to);
            const float* rows[] = {to, given + i * norm.width};
            kernels.add_parts(nullptr, rows, shares, 2, norm.width, to);
        }
    });
}

void let_in(const IsaKernels& kernels, Pool& pool, const LayerEmbedding& embedding, const float* own, std::size_t n_tokens, float* x) {
    float* added = added_by(kernels, pool, embedding, own, x, n_tokens);
    const std::size_t width = embedding.project.matrix->n_out;
    by_rows(pool, n_tokens, width, [&](std::size_t begin, std::size_t end) {
        for (std::size_t t = begin; t < end; ++t) {
            if (embedding.norm.weight) kernels.normalize(embedding.norm, added + t * width, 1, added + t * width);
            add(kernels, added + t * width, width, 1.0f, x + t * width);
        }
    });
}

}  // namespace slm
