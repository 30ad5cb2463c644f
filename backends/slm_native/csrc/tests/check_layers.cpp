#include "tests/check_layers.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <vector>

#include "tests/check_models.h"

namespace slm {

namespace {

constexpr std::size_t steps[] = {70, 1, 6, 1, 64, 8};  // tokens of each batch: some batches cross pages
constexpr std::int32_t pages[] = {3, 0, 2};            // pages of the sequence, in another order than in memory
constexpr std::size_t n_pages = 4;

// The error from rounding keys and values, relative to the largest result: some steps of their codes. For floats, sums
// of 60 terms lose at most 60 * 2 ** -24; ten products follow each other.
constexpr double tolerance[n_kv_types] = {4e-5, 2e-3, 2e-2, 2e-2, 0.05, 0.1, 0.25};

// The caches of all layers, and their memory.
struct Caches {
    std::unique_ptr<std::uint8_t[]> memory;
    std::vector<KvLayer> layers;
};

Caches caches_of(const Model& model, KvType type) {
    std::size_t bytes[most_planes], page_bytes = 0;
    const std::size_t n_layers = model.layers.size();
    token_bytes(type, model.head_dim, bytes);
    for (std::size_t plane : bytes)
        page_bytes += (model.is_latent ? 1 : 2) * n_layers * model.n_kv_heads * page_tokens * plane;
    Caches caches{std::unique_ptr<std::uint8_t[]>(new std::uint8_t[n_pages * page_bytes]()), {}};
    for (std::size_t i = 0; i < n_layers; ++i)
        caches.layers.push_back(layer_of(caches.memory.get(), n_pages, page_bytes, type, type, model.is_latent,
                                         {n_layers, i, model.n_kv_heads, model.head_dim}));
    return caches;
}

// Every third token of a batch, and the last one; ascending.
std::vector<std::int64_t> some_of(std::size_t n) {
    std::vector<std::int64_t> some;
    for (std::size_t t = 0; t < n; ++t)
        if (t % 3 == 1 || t + 1 == n) some.push_back(std::int64_t(t));
    return some;
}

// Runs one batch of n tokens from token `start`; copies the rows of all tokens, or of output_tokens, to x.
void run_batch(const Model& model, const IsaKernels& kernels, Pool& pool, const Caches& caches, std::size_t start,
               std::size_t n, const std::vector<std::int64_t>* output_tokens, std::vector<float>& x) {
    std::vector<std::int32_t> tokens(n);
    std::iota(tokens.begin(), tokens.end(), 0);
    std::vector<std::int64_t> page(n), slot(n), rows(n);
    std::iota(rows.begin(), rows.end(), 0);
    for (std::size_t t = 0; t < n; ++t)
        page[t] = pages[(start + t) / page_tokens], slot[t] = std::int64_t((start + t) % page_tokens);
    const std::vector<Run> runs{{tokens.data(), pages, n, start + n}};
    const std::size_t half = model.n_rotated / 2, width = model.width;
    std::vector<LayerInputs> inputs;
    for (std::size_t i = 0; i < model.layers.size(); ++i) {
        const float* embedding = model.layer_embeddings.empty()
                                     ? nullptr
                                     : &model.layer_embeddings[i][start * model.layer_embeddings[i].size() / n_all];
        const Rotation rotation{&model.cos[start * half], &model.sin[start * half], half, model.interleaved(i)};
        inputs.push_back({&caches.layers[model.caches[i]], rotation, embedding});
    }
    std::vector<float> streams;
    for (std::size_t k = 0; k < model.n_streams; ++k)
        streams.insert(streams.end(), &x[(k * n_all + start) * width], &x[(k * n_all + start) * width] + n * width);
    run_layers(kernels, pool, model.layers, inputs, {n, page.data(), slot.data(), &runs}, output_tokens,
               model.n_streams, streams.data());
    const std::vector<std::int64_t>& computed = output_tokens ? *output_tokens : rows;
    for (std::size_t i = 0; i < model.n_streams * computed.size(); ++i)
        std::copy_n(&streams[i * width], width,
                    &x[(i / computed.size() * n_all + start + std::size_t(computed[i % computed.size()])) * width]);
}

// The largest error of all batches relative to the largest result; for some tokens, or for all.
double worst_of(const Model& model, const IsaKernels& kernels, Pool& pool, KvType type, bool some, std::vector<float> x,
                const Wide& expected) {
    const Caches caches = caches_of(model, type);
    double worst = 0, largest = 0;
    for (double value : expected) largest = std::max(largest, std::abs(value));
    std::size_t start = 0;
    for (std::size_t n : steps) {
        const std::vector<std::int64_t> output_tokens = some_of(n);
        run_batch(model, kernels, pool, caches, start, n, some ? &output_tokens : nullptr, x);
        for (std::size_t k = 0; k < model.n_streams; ++k)
            for (std::size_t t = 0; t < n; ++t) {
                if (some && !std::binary_search(output_tokens.begin(), output_tokens.end(), std::int64_t(t))) continue;
                for (std::size_t i = (k * n_all + start + t) * model.width, end = i + model.width; i < end; ++i)
                    if (const double off = std::abs(double(x[i]) - expected[i]); !(off <= worst))
                        worst = off;  // keeps NaN, too
            }
        start += n;
    }
    return worst / largest;
}

}  // namespace

bool check_layers(Isa isa, int n_threads) {
    const IsaKernels& kernels = kernels_of(isa);
    const auto pool = Pool::shared(n_threads);
    bool all_right = true;
    for (const auto& [name, model, rounds] : models_of(kernels)) {
        const std::vector<float> x = random_floats(model->n_streams * n_all * model->width, 99, 1);
        const Wide expected = plain_layers(*model, x);
        for (std::size_t type = 0; type < (rounds ? n_kv_types : 1); ++type)
            for (bool some : {false, true}) {
                if (some && type > 1) continue;  // the choice of tokens does not depend on the KV type
                const double worst = worst_of(*model, kernels, *pool, KvType(type), some, x, expected);
                if (worst <= tolerance[type]) continue;
                all_right = false;
                std::printf("%s, %d threads: layers of %s, KV type %zu, %s tokens: off by %g of the largest\n",
                            name_of(isa), n_threads, name, type, some ? "some" : "all", worst);
            }
    }
    return all_right;
}

}  // namespace slm
