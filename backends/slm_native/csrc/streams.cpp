#include "streams.h"

#include <algorithm>
#include <cmath>

namespace slm {

namespace {

constexpr std::size_t least_part = 1 << 12;  // values; fewer are done before a thread has heard of it

// Of the thread that calls, and of whoever computes.
thread_local Scratch shares_scratch, read_scratch, added_scratch, low_scratch, rows_scratch;

// task(t) for each token, of so many values.
template <class Task>
void by_token(Pool& pool, std::size_t n_tokens, std::size_t width, const Task& task) {
    const std::size_t step = std::max<std::size_t>(1, least_part / std::max<std::size_t>(1, width));
    pool.run((n_tokens + step - 1) / step, [&](std::size_t part) {
        for (std::size_t t = part * step; t < std::min(n_tokens, (part + 1) * step); ++t) task(t);
    });
}

// What a linear makes of what the router makes of x [T][E], from -1 to 1: [T][n_out]; in shares_scratch.
const float* shares_of(const IsaKernels& kernels, Pool& pool, const AltUp& altup, const Linear& linear, const float* x,
                       std::size_t n_tokens, std::size_t width) {
    const std::size_t n = altup.router.matrix->n_out;
    float *read = read_scratch.room<float>(n_tokens * width), *modalities = shares_scratch.room<float>(n_tokens * (n + linear.matrix->n_out));
    const float part = float(1.0 / double(width));
    by_token(pool, n_tokens, width, [&](std::size_t t) {
        float* row = read + t * width;
        kernels.normalize(altup.router_norm, x + t * width, 1, row);
        for (std::size_t i = 0; i < width; ++i) row[i] *= part;
    });
    const Made routed{&altup.router, modalities};
    project(kernels, pool, read, n_tokens, {}, {&routed, 1});
    for (std::size_t i = 0; i < n_tokens * n; ++i) modalities[i] = std::tanh(modalities[i]);
    float* shares = modalities + n_tokens * n;
    const Made made{&linear, shares};
    project(kernels, pool, modalities, n_tokens, {}, {&made, 1});
    return shares;
}

// What a layer's own embedding [T][P] adds to x [T][E]: [T][E]; in added_scratch.
const float* added_by(const IsaKernels& kernels, Pool& pool, const LayerEmbedding& embedding, const float* own, const float* x,
                      std::size_t n_tokens) {
    const std::size_t n_low = embedding.gate.matrix->n_out, width = embedding.project.matrix->n_out;
    float *low = low_scratch.room<float>(n_tokens * n_low), *added = added_scratch.room<float>(n_tokens * width);
    const Made gate{&embedding.gate, low}, made{&embedding.project, added};
    project(kernels, pool, x, n_tokens, {}, {&gate, 1});
    activate(kernels, pool, low, own, n_tokens * n_low, embedding.activation, low);
    project(kernels, pool, low, n_tokens, {}, {&made, 1});
    if (embedding.norm.weight) normalize(kernels, pool, added, n_tokens * width, embedding.norm, added);
    return added;
}

}  // namespace

void predict(const IsaKernels& kernels, Pool& pool, const AltUp& altup, const Streams& streams) {
    const std::size_t n = streams.n, width = streams.width;
    const float* shares = shares_of(kernels, pool, altup, altup.predict, streams[altup.active], streams.n_tokens, width);
    by_token(pool, streams.n_tokens, n * n * width, [&](std::size_t t) {
        float* mixed = rows_scratch.room<float>(n * width);
        for (std::size_t i = 0; i < n; ++i) {
            float* row = mixed + i * width;
            std::copy_n(streams[i] + t * width, width, row);
            for (std::size_t j = 0; j < n; ++j) {
                const float *other = streams[j] + t * width, share = shares[t * n * n + i * n + j];
                for (std::size_t e = 0; e < width; ++e) row[e] += other[e] * share;
            }
        }
        for (std::size_t i = 0; i < n; ++i) std::copy_n(mixed + i * width, width, streams[i] + t * width);
    });
}

void correct(const IsaKernels& kernels, Pool& pool, const AltUp& altup, const LayerEmbedding& embedding, const float* own,
             const float* made, const Streams& streams) {
    const std::size_t n = streams.n, width = streams.width;
    const float* shares = shares_of(kernels, pool, altup, altup.correct, made, streams.n_tokens, width);
    float* read = read_scratch.room<float>(streams.n_tokens * width);  // what the embedding's gate reads
    by_token(pool, streams.n_tokens, n * width, [&](std::size_t t) {
        float* news = rows_scratch.room<float>(width);
        const float* expected = streams[altup.active] + t * width;
        for (std::size_t e = 0; e < width; ++e) news[e] = made[t * width + e] - expected[e];
        for (std::size_t i = 0; i < n; ++i) {
            const float share = shares[t * n + i] + 1.0f;
            float* row = streams[i] + t * width;
            for (std::size_t e = 0; e < width; ++e) row[e] += news[e] * share;
        }
        for (std::size_t e = 0; e < width; ++e) read[t * width + e] = expected[e] * altup.scale[e];
    });
    const float* added = added_by(kernels, pool, embedding, own, read, streams.n_tokens);
    by_token(pool, streams.n_tokens, n * width, [&](std::size_t t) {
        for (std::size_t i = 1; i < n; ++i)
            for (std::size_t e = t * width; e < (t + 1) * width; ++e) streams[i][e] += added[e];
    });
}

void let_in(const IsaKernels& kernels, Pool& pool, const LayerEmbedding& embedding, const float* own, std::size_t n_tokens, float* x) {
    const float* added = added_by(kernels, pool, embedding, own, x, n_tokens);
    const std::size_t n = n_tokens * embedding.project.matrix->n_out;
    for (std::size_t i = 0; i < n; ++i) x[i] += added[i];
}

}  // namespace slm
