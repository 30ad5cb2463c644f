// Checks products, layers and MoE layers of every instruction set, with several numbers of threads, without Python: for
// sanitizer builds and emulated machines.
//
// usage: check_products CASES [INSTRUCTION_SET...]
// tests/kernel_cases.py writes the file CASES. Without names, all instruction sets of this machine are checked. A named
// instruction set that the machine lacks is an error.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/check_layers.h"
#include "tests/check_moe.h"
#include "tests/check_pool.h"
#include "tests/reference_arithmetic.h"
#include "matmul/embedding.h"
#include "isa.h"
#include "matmul/products.h"

namespace {

constexpr std::size_t token_counts[] = {1, 2, 3, 4, 5, 8, 9, 16, 17, 40, 70, 300};

struct Expected {
    std::vector<double> values, bound;  // [n_tokens][n_out]
};

struct Case {
    std::int32_t type, n_out, n_in, n_tokens;
    std::unique_ptr<std::uint8_t[]>
        memory;               // weights from the second byte on, so that sanitizers see reads beyond the end
    std::vector<float> x;     // [n_tokens][n_in]
    Expected exact, of_bf16;  // for the weights, and for the weights in bf16
};

template <class T>
void read(std::istream& file, T* values, std::size_t n) {
    file.read(reinterpret_cast<char*>(values), std::streamsize(n * sizeof(T)));
    if (!file) throw std::runtime_error("the file of cases ends early");
}

std::vector<Case> read_cases(const char* path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error(std::string("cannot read ") + path);
    std::int32_t n_cases = 0;
    read(file, &n_cases, 1);
    std::vector<Case> cases(static_cast<std::size_t>(n_cases));
    for (Case& c : cases) {
        std::int32_t n_bytes = 0;
        for (std::int32_t* number : {&c.type, &c.n_out, &c.n_in, &c.n_tokens, &n_bytes}) read(file, number, 1);
        c.memory.reset(new std::uint8_t[std::size_t(n_bytes) + 1]);
        read(file, c.memory.get() + 1, std::size_t(n_bytes));
        c.x.resize(std::size_t(c.n_tokens) * std::size_t(c.n_in));
        read(file, c.x.data(), c.x.size());
        for (std::vector<double>* part : {&c.exact.values, &c.exact.bound, &c.of_bf16.values, &c.of_bf16.bound}) {
            part->resize(std::size_t(c.n_tokens) * std::size_t(c.n_out));
            read(file, part->data(), part->size());
        }
    }
    return cases;
}

// With the thread sanitizer, only races between threads are checked.
#if defined(__SANITIZE_THREAD__)
constexpr bool only_races = true;
#else
constexpr bool only_races = false;
#endif

slm::Matrix matrix_of(const Case& c, const slm::IsaKernels& kernels) {
    slm::Matrix m{nullptr, nullptr, c.memory.get() + 1, std::size_t(c.n_out), std::size_t(c.n_in), 0};
    for (std::size_t i = 0; i < kernels.n_floats; ++i)
        if (kernels.floats[i].type == c.type) m.floats = &kernels.floats[i], m.row_bytes = m.n_in * m.floats->bytes;
    for (std::size_t i = 0; i < kernels.n_formats; ++i)
        if (const slm::FormatKernels& f = kernels.formats[i]; f.type == c.type)
            m.format = &f, m.row_bytes = m.n_in / std::size_t(f.block) * f.block_bytes;
    if (!m.format && !m.floats) throw std::runtime_error("no kernel for ggml type " + std::to_string(c.type));
    return m;
}

// Whether weights are rounded to bf16: on a matrix unit, except float32 and float16.
bool rounds(const Case& c, const slm::IsaKernels& kernels, std::size_t n) {
    constexpr std::size_t few = 6;
    return kernels.unit && n > few && c.type > 1;
}

// The largest error of a product of the first n tokens, as a fraction of its bound.
double worst_of(const Case& c, const slm::IsaKernels& kernels, slm::Pool& pool, std::size_t n) {
    const slm::Matrix matrix = matrix_of(c, kernels);
    std::vector<float> y(n * matrix.n_out, NAN);
    const slm::Product product{&matrix, y.data()};
    slm::multiply(kernels, pool, c.x.data(), n, {&product, 1});
    const Expected& expected = rounds(c, kernels, n) ? c.of_bf16 : c.exact;
    double worst = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
        const double share = std::abs(double(y[i]) - expected.values[i]) / expected.bound[i];
        if (!(share <= worst)) worst = share;  // keeps NaN, too
    }
    return worst;
}

// The same for products of all tokens with dequantized rows.
double worst_of_rows(const Case& c, const slm::IsaKernels& kernels, slm::Pool& pool) {
    const slm::Matrix matrix = matrix_of(c, kernels);
    std::vector<std::int32_t> rows(matrix.n_out);
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<float> weights(matrix.n_out * matrix.n_in, NAN);
    slm::embed(pool, matrix, rows, weights.data());
    double worst = 0;
    for (std::size_t i = 0; i < c.exact.values.size(); ++i) {
        const float *x = &c.x[i / matrix.n_out * matrix.n_in], *row = &weights[i % matrix.n_out * matrix.n_in];
        const double share = std::abs(slm::dot(x, row, matrix.n_in) - c.exact.values[i]) / c.exact.bound[i];
        if (!(share <= worst)) worst = share;
    }
    return worst;
}

bool check(const std::vector<Case>& cases, slm::Isa isa, int n_threads) {
    const auto pool = slm::Pool::shared(n_threads);
    bool all_right = true;
    for (const Case& c : cases) {
        // Rows are dequantized by the same code for any number of threads.
        const double worst_row = n_threads > 1 ? worst_of_rows(c, slm::kernels_of(isa), *pool) : 0;
        if (!(worst_row <= 1)) {
            all_right = false;
            std::printf("%s, %d threads: type %d, %d x %d: rows off by %g times the bound\n", slm::name_of(isa),
                        n_threads, c.type, c.n_out, c.n_in, worst_row);
        }
        for (std::size_t n : token_counts) {
            if (n > std::size_t(c.n_tokens)) continue;
            const double worst = worst_of(c, slm::kernels_of(isa), *pool, n);
            if (worst <= 1) continue;
            all_right = false;
            std::printf("%s, %d threads: type %d, %d x %d, %zu tokens: off by %g times the bound\n", slm::name_of(isa),
                        n_threads, c.type, c.n_out, c.n_in, n, worst);
        }
    }
    return all_right;
}

// Several concurrent callers of one pool, which is destroyed after the last call, many times.
bool check_callers(const std::vector<Case>& cases, slm::Isa isa) {
    std::vector<char> right(3, true);
    std::vector<std::thread> callers;
    callers.reserve(right.size());
    for (std::size_t i = 0; i < right.size(); ++i)
        callers.emplace_back([&, i] {
            for (std::size_t round = 0; round < 20; ++round) {
                const Case& c = cases[(i + round) % cases.size()];
                const auto pool = slm::Pool::shared(3);
                if (!(worst_of(c, slm::kernels_of(isa), *pool, std::size_t(c.n_tokens)) <= 1)) right[i] = false;
            }
        });
    for (std::thread& caller : callers) caller.join();
    const bool all_right = std::find(right.begin(), right.end(), false) == right.end();
    if (!all_right) std::printf("%s: wrong products for callers at once\n", slm::name_of(isa));
    return all_right;
}

std::vector<slm::Isa> isas_named(int n_names, char** names) {
    std::vector<slm::Isa> chosen;
    for (slm::Isa isa : slm::all_isas) {
        const bool named = std::find(names, names + n_names, std::string(slm::name_of(isa))) != names + n_names;
        if (slm::is_available(isa) && (named || n_names == 0)) chosen.push_back(isa);
    }
    if (n_names != 0 && chosen.size() != std::size_t(n_names))
        throw std::runtime_error("an instruction set named is not available here");
    return chosen;
}

}  // namespace

int main(int n_arguments, char** arguments) {
    if (n_arguments < 2) {
        std::fprintf(stderr, "usage: check_products CASES [INSTRUCTION_SET...]\n");
        return 2;
    }
    try {
        const std::vector<Case> cases = read_cases(arguments[1]);
        bool all_right = !cases.empty() && slm::check_pool(1) && slm::check_pool(3);
        for (slm::Isa isa : isas_named(n_arguments - 2, arguments + 2)) {
            for (int n_threads : {1, 3}) {
                if (n_threads == 1 && only_races) continue;
                slm::reads_one_stream = n_threads == 1;  // both orders of rows are checked on any machine
                all_right &= check(cases, isa, n_threads);
                all_right &= slm::check_layers(isa, n_threads) && slm::check_moe(isa, n_threads);
            }
            all_right &= check_callers(cases, isa);
            std::printf("%s: %zu cases checked\n", slm::name_of(isa), cases.size());
        }
        return all_right ? 0 : 1;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "check_products: %s\n", error.what());
        return 2;
    }
}
