#include "products.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace slm {

namespace {

// Of the thread that called.
thread_local Scratch normed_scratch, gate_scratch;

std::size_t div_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

constexpr std::size_t least_part = 1 << 13;  // values; less is done before a thread has heard of it

// Values 0 .. n - 1 in parts that are multiples of `unit`.
template <class Task>
void in_parts(Pool& pool, std::size_t n, std::size_t unit, const Task& task) {
    const std::size_t n_units = n / unit, most = std::max<std::size_t>(1, n / least_part);
    const std::size_t n_parts = std::min({n_units, most, 4 * std::size_t(pool.n_threads())});
    const std::size_t step = div_up(n_units, std::max<std::size_t>(1, n_parts)) * unit;
    pool.run(div_up(n, step), [&](std::size_t i) { task(i * step, std::min(n, (i + 1) * step)); });
}

const float* normed(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, std::size_t width, Norm norm) {
    if (!norm.weight) return x;
    float* to = normed_scratch.room<float>(n_tokens * width);
    in_parts(pool, n_tokens * width, width, [&](std::size_t begin, std::size_t end) {
        kernels.rms_norm(x + begin, (end - begin) / width, width, norm.weight, norm.eps, to + begin);
    });
    return to;
}

}  // namespace

const IsaKernels& kernels_of(Isa isa) {
#if defined(SLM_HAVE_X86)
    if (isa == Isa::avx512) return avx512::kernels;
    if (isa == Isa::avx_vnni) return avx_vnni::kernels;
    if (isa == Isa::avx2) return avx2::kernels;
#endif
#if defined(SLM_HAVE_NEON)
    if (isa == Isa::neon) return neon::kernels;
#endif
    static_cast<void>(isa);
    return scalar::kernels;
}

void multiply(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, std::span<const Product> products) {
    if (n_tokens == 0 || products.empty()) return;
    std::vector<Multiplication> all;
    for (const Product& p : products) all.push_back({p.matrix, x, n_tokens, p.y});
    multiply_all(kernels, pool, all);
}

void project(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, Norm norm,
             std::span<const Product> products) {
    if (n_tokens == 0 || products.empty()) return;
    multiply(kernels, pool, normed(kernels, pool, x, n_tokens, products[0].matrix->n_in, norm), n_tokens, products);
}

void gate_up(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, Norm norm, const Matrix& gate,
             const Matrix& up, float* y) {
    const std::size_t n = n_tokens * up.n_out;
    if (n == 0) return;
    float* other = gate_scratch.room<float>(n);
    const Product products[2] = {{&gate, y}, {&up, other}};
    project(kernels, pool, x, n_tokens, norm, products);
    in_parts(pool, n, 1, [&](std::size_t begin, std::size_t end) {
        kernels.silu_mul(y + begin, other + begin, end - begin, y + begin);
    });
}

void add_product(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Matrix& matrix,
                 const float* residual, float* y) {
    const Product product{&matrix, y};
    multiply(kernels, pool, x, n_tokens, {&product, 1});
    const std::size_t n = n_tokens * matrix.n_out;
    if (n == 0) return;
    in_parts(pool, n, 1, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) y[i] += residual[i];
    });
}

void turn_heads(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, std::size_t n_heads,
                std::size_t width, Norm norm, Rotation rotation, float* y) {
    const std::size_t per_token = n_heads * width;
    if (n_tokens * per_token == 0) return;
    in_parts(pool, n_tokens * per_token, per_token, [&](std::size_t begin, std::size_t end) {
        if (norm.weight) kernels.rms_norm(x + begin, (end - begin) / width, width, norm.weight, norm.eps, y + begin);
        else if (y != x) std::memcpy(y + begin, x + begin, (end - begin) * sizeof(float));
        if (rotation.half == 0) return;
        for (std::size_t t = begin / per_token; t < end / per_token; ++t)
            kernels.rotate(y + t * per_token, n_heads, width, rotation.cos + t * rotation.half, rotation.sin + t * rotation.half,
                           rotation.half, rotation.interleaved);
    });
}

}  // namespace slm
