#include "tests/check_moe.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <numeric>
#include <random>
#include <vector>

#include "layers/moe.h"
#include "tests/reference_arithmetic.h"

namespace slm {

namespace {

constexpr std::size_t width = 288, n_ff = 96, n_shared_ff = 128;  // more than a span, and less than one
constexpr std::size_t n_experts = 7, n_used = 3;
constexpr std::size_t counts[] = {1, 5, 70};
constexpr float unit = 0x1p-10f;  // the scale of every block of Q8_0

// The error from rounding activations to int8, relative to the largest result: three products with about 0.5 % each.
constexpr double tolerance_of_floats = 1e-5, tolerance_of_packed = 3e-2;

struct Weights {
    std::vector<std::uint8_t> bytes;
    Wide exact;  // [n_out][n_in]
    Matrix matrix;
    std::vector<float> bias;
};

// An MoE layer and the memory of its weights, at stable addresses.
struct Model {
    std::deque<Weights> weights;
    MoeLayer moe;
};

void pack_q8_0(std::mt19937& generator, std::size_t n, Weights& to) {
    std::uniform_int_distribution<int> codes(-127, 127);
    for (std::size_t i = 0; i < n; ++i) {
        if (i % 32 == 0) to.bytes.insert(to.bytes.end(), {0x00, 0x14});  // 2 ** -10 as a half
        const int code = codes(generator);
        to.bytes.push_back(std::uint8_t(code)), to.exact.push_back(double(code) * unit);
    }
}

void store_floats(std::mt19937& generator, std::size_t n, Weights& to) {
    std::normal_distribution<float> normal(0, 0.1f);
    std::vector<float> values(n);
    for (float& value : values) value = normal(generator);
    to.bytes.resize(4 * n), to.exact.assign(values.begin(), values.end());
    std::copy_n(reinterpret_cast<const std::uint8_t*>(values.data()), 4 * n, to.bytes.data());
}

Linear linear_of(Model& model, const IsaKernels& kernels, std::size_t n_out, std::size_t n_in, bool packed) {
    std::mt19937 generator(unsigned(model.weights.size()));
    Weights& weights = model.weights.emplace_back();
    const FormatKernels* format = kernels.formats;
    const FloatKernels* floats = kernels.floats;
    while (format->type != 8) ++format;  // Q8_0
    while (floats->type != 0) ++floats;  // F32
    if (packed) pack_q8_0(generator, n_out * n_in, weights);
    else store_floats(generator, n_out * n_in, weights);
    const std::size_t row_bytes = weights.bytes.size() / n_out;
    weights.matrix = {
        packed ? format : nullptr, packed ? nullptr : floats, weights.bytes.data(), n_out, n_in, row_bytes};
    weights.bias.assign(n_out, float(model.weights.size() % 5) / 10);
    return {&weights.matrix, weights.bias.data(), 1.5f};
}

void fill(Model& model, const IsaKernels& kernels, bool packed) {
    MoeLayer& m = model.moe;
    const auto expert = [&](std::size_t n) {
        const Linear gate = linear_of(model, kernels, n, width, packed);
        const Linear up = linear_of(model, kernels, n, width, packed);
        return FeedForward{gate, up, linear_of(model, kernels, width, n, packed)};
    };
    m.router = linear_of(model, kernels, n_experts, width, false);
    m.routing = {n_experts, n_used, 1, 1, Gating::softmax, true, 1.0f, nullptr};
    m.activation = {ActivationKind::silu, 0, 0, 0, 0}, m.scales_input = false;
    for (std::size_t i = 0; i < n_experts; ++i) m.experts.push_back(expert(n_ff));
    m.shared = expert(n_shared_ff), m.shared_gate = linear_of(model, kernels, 1, width, packed);
}

Wide times(const Model& model, const double* x, const Linear& by) {
    const auto is_it = [&](const Weights& w) { return &w.matrix == by.matrix; };
    const auto weights = std::find_if(model.weights.begin(), model.weights.end(), is_it);
    Wide y;
    for (std::size_t r = 0; r < by.matrix->n_out; ++r) {
        const double* row = &weights->exact[r * by.matrix->n_in];
        y.push_back(dot(row, x, by.matrix->n_in) * double(by.scale) + double(by.bias[r]));
    }
    return y;
}

void add_expert(const Model& model, const double* x, const FeedForward& by, double weight, double* y) {
    Wide gate = times(model, x, by.gate);
    const Wide up = times(model, x, by.up);
    for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
    const Wide down = times(model, gate.data(), by.down);
    for (std::size_t i = 0; i < width; ++i) y[i] += weight * down[i];
}

Wide expected(const Model& model, const std::vector<float>& x) {
    const Wide read(x.begin(), x.end());
    Wide y(x.size());
    for (std::size_t t = 0; t < x.size(); t += width) {
        Wide scores = times(model, &read[t], model.moe.router);
        std::vector<std::size_t> order(n_experts);
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
        double total = 0;
        for (std::size_t i = 0; i < n_used; ++i) total += std::exp(scores[order[i]]);
        for (std::size_t i = 0; i < n_used; ++i)
            add_expert(model, &read[t], model.moe.experts[order[i]], std::exp(scores[order[i]]) / total, &y[t]);
        const double share = 1 / (1 + std::exp(-times(model, &read[t], model.moe.shared_gate)[0]));
        add_expert(model, &read[t], model.moe.shared, share, &y[t]);
    }
    return y;
}

double worst_of(const Model& model, const IsaKernels& kernels, Pool& pool, std::size_t n) {
    std::mt19937 generator{unsigned(n)};
    std::normal_distribution<float> normal(0, 1);
    std::vector<float> x(n * width), y(n * width, NAN);
    for (float& value : x) value = normal(generator);
    run_moe(kernels, pool, model.moe, x.data(), nullptr, n, {}, {}, y.data());
    const Wide reference = expected(model, x);
    double worst = 0, largest = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
        largest = std::max(largest, std::abs(reference[i]));
        if (const double off = std::abs(double(y[i]) - reference[i]); !(off <= worst)) worst = off;
    }
    return worst / largest;
}

}  // namespace

bool check_moe(Isa isa, int n_threads) {
    const IsaKernels& kernels = kernels_of(isa);
    const auto pool = Pool::shared(n_threads);
    bool all_right = true;
    for (bool packed : {false, true}) {
        Model model;
        fill(model, kernels, packed);
        for (std::size_t n : counts) {
            const double worst = worst_of(model, kernels, *pool, n);
            if (worst <= (packed ? tolerance_of_packed : tolerance_of_floats)) continue;
            all_right = false;
            std::printf("%s, %d threads: %s experts, %zu tokens: off by %g of the largest\n", name_of(isa), n_threads,
                        packed ? "packed" : "float", n, worst);
        }
    }
    return all_right;
}

}  // namespace slm
