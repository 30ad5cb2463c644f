#include "matmul/products.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "parallel_rows.h"

namespace slm {

namespace {

// They belong to the calling thread.
thread_local Scratch gate_scratch, lora_scratch;

std::size_t div_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

// Runs `task` on parts of 0 .. n - 1 whose sizes are multiples of `unit`.
template <class Task>
void in_parts(Pool& pool, std::size_t n, std::size_t unit, const Task& task) {
    if (n == 0) return;
    const std::size_t n_units = n / unit, most = std::max<std::size_t>(1, n / least_part);
    const std::size_t n_parts = std::min({n_units, most, 4 * std::size_t(pool.n_threads())});
    const std::size_t step = div_up(n_units, std::max<std::size_t>(1, n_parts)) * unit;
    pool.run(div_up(n, step), [&](std::size_t i) { task(i * step, std::min(n, (i + 1) * step)); });
}

// Normalized rows of x.
class NormedRows final : public RowSource {
public:
    NormedRows(const IsaKernels& kernels, const Norm& norm, const float* x) : kernels_(kernels), norm_(norm), x_(x) {}
    void make(std::size_t i, float* to) const override { kernels_.normalize(norm_, x_ + i * norm_.width, 1, to); }

private:
    const IsaKernels& kernels_;
    const Norm& norm_;
    const float* x_;
};

// Applies scale and bias, then `more`, to each part of the rows.
template <class More>
void finish_parts(Pool& pool, const Linear& linear, std::size_t n_tokens, float* y, const More& more) {
    const std::size_t width = linear.matrix->n_out;
    in_parts(pool, n_tokens * width, width, [&](std::size_t begin, std::size_t end) {
        finish(linear, y + begin, (end - begin) / width);
        more(begin, end);
    });
}

bool is_plain(const Linear& linear) { return !linear.bias && linear.scale == 1.0f; }

// Multiplies x by the matrix of a linear; returns the linear with the scale and the bias that `finish` has to apply.
Linear make(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Linear& linear,
            float* y) {
    if (linear.lora.a) {
        const Projection projection{&linear, y};
        project(kernels, pool, x, n_tokens, {}, {&projection, 1});
        return {linear.matrix, nullptr};
    }
    const Product product{linear.matrix, y};
    multiply(kernels, pool, x, n_tokens, {&product, 1});
    return linear;
}

// Adds the changes of adapters to the outputs; `low` has x @ a.T of each projection with a change, one after the other.
void add_changes(const IsaKernels& kernels, Pool& pool, std::size_t n_tokens, std::span<const Projection> projections,
                 const float* low) {
    struct Part {
        const Projection* projection;
        const float* low;
        std::size_t begin;
    };
    std::vector<Part> parts;
    for (const Projection& one : projections) {
        if (!one.linear->lora.a) continue;
        for (std::size_t begin = 0; begin < one.linear->matrix->n_out; begin += lora_columns)
            parts.push_back({&one, low, begin});
        low += n_tokens * one.linear->lora.a->n_out;
    }
    pool.run(parts.size(), [&](std::size_t i) {
        const auto& [projection, shares, begin] = parts[i];
        const Lora& lora = projection->linear->lora;
        const std::size_t n_out = projection->linear->matrix->n_out, rank = lora.a->n_out;
        const std::size_t n_here = std::min(lora_columns, n_out - begin);
        for (std::size_t t = 0; t < n_tokens; ++t)  // the block of b stays in the cache
            kernels.add_f16_rows(lora.b + begin * rank, shares + t * rank, rank, n_here,
                                 projection->y + t * n_out + begin);
    });
}

}  // namespace

#if defined(SLM_HAVE_X86) && !defined(SLM_UP_TO_AVX2)
namespace {

// AVX-512 with extensions of later processors.
class Extended {
public:
    Extended(const TileKernels* unit, const AttentionKernels* attention) : kernels_(avx512::kernels) {
        std::copy_n(kernels_.floats, kernels_.n_floats, floats_);
        for (FloatKernels& one : floats_)
            if (one.type == bf16_type) one.rows_of_bf16 = avx512_bf16::rows_of_bf16;
        kernels_.floats = floats_;
        kernels_.unit = unit;
        kernels_.attention = attention;
    }
    const IsaKernels& kernels() const { return kernels_; }

private:
    static constexpr int bf16_type = 30;
    FloatKernels floats_[3];
    IsaKernels kernels_;
};

}  // namespace
#endif

#if defined(SLM_HAVE_NEON)
namespace {

class WithI8mm {
public:
    WithI8mm() : kernels_(neon::kernels), formats_(kernels_.formats, kernels_.formats + kernels_.n_formats) {
        for (FormatKernels& one : formats_) one.tiles = neon_i8mm::tiles_of(one.type);
        kernels_.formats = formats_.data();
        kernels_.pack = neon_i8mm::pack_pairs;
    }
    const IsaKernels& kernels() const { return kernels_; }

private:
    IsaKernels kernels_;
    std::vector<FormatKernels> formats_;
};

}  // namespace
#endif

const IsaKernels& kernels_of(Isa isa) {
#if defined(SLM_HAVE_X86) && !defined(SLM_UP_TO_AVX2)
    static const Extended with_bf16(nullptr, &avx512::attending::kernels);
    static const Extended with_unit(&amx::tile_kernels, &amx::attending::kernels);
    static const Extended with_plain_tiles(&amx_plain::tile_kernels, &amx_plain::attending::kernels);
    if (isa == Isa::amx) return with_unit.kernels();
    if (isa == Isa::amx_plain) return with_plain_tiles.kernels();
    if (isa == Isa::avx512_bf16) return with_bf16.kernels();
    if (isa == Isa::avx512) return avx512::kernels;
    if (isa == Isa::avx_vnni) return avx_vnni::kernels;
#endif
#if defined(SLM_HAVE_X86)
    if (isa == Isa::avx2) return avx2::kernels;
#endif
#if defined(SLM_HAVE_NEON)
    if (isa == Isa::neon) return neon::kernels;
    if (isa == Isa::neon_i8mm) {  // constructed only on processors with i8mm
        static const WithI8mm with_i8mm;
        return with_i8mm.kernels();
    }
#endif
    static_cast<void>(isa);
    return scalar::kernels;
}

void multiply(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens,
              std::span<const Product> products) {
    if (n_tokens == 0 || products.empty()) return;
    std::vector<Multiplication> all;
    for (const Product& p : products) all.push_back({p.matrix, x, n_tokens, p.y});
    multiply_all(kernels, pool, all);
}

void finish(const Linear& linear, float* y, std::size_t n_rows) {
    const std::size_t n = linear.matrix->n_out;
    if (linear.scale != 1.0f)
        for (std::size_t i = 0; i < n_rows * n; ++i) y[i] *= linear.scale;
    for (std::size_t row = 0; linear.bias && row < n_rows; ++row)
        for (std::size_t i = 0; i < n; ++i) y[row * n + i] += linear.bias[i];
}

void normalize(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n, const Norm& norm, float* y) {
    in_parts(pool, n, norm.width * norm.n_rows, [&](std::size_t begin, std::size_t end) {
        kernels.normalize(norm, x + begin, (end - begin) / norm.width, y + begin);
    });
}

void project(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Norm& norm,
             std::span<const Projection> projections) {
    if (n_tokens == 0 || projections.empty()) return;
    const NormedRows rows(kernels, norm, x);
    std::size_t ranks = 0;
    for (const Projection& one : projections) ranks += one.linear->lora.a ? one.linear->lora.a->n_out : 0;
    float *const low = ranks ? lora_scratch.buffer<float>(n_tokens * ranks) : nullptr, *next = low;
    std::vector<Multiplication> products;
    const auto add = [&](const Matrix* matrix, float* y) {
        products.push_back({matrix, x, n_tokens, y});
        if (norm.weight) products.back().source = &rows;
    };
    for (const Projection& one : projections) {  // first, as each may be a single task
        if (!one.linear->lora.a) continue;
        add(one.linear->lora.a, next);
        next += n_tokens * one.linear->lora.a->n_out;
    }
    for (const Projection& one : projections) add(one.linear->matrix, one.y);
    multiply_all(kernels, pool, products);
    for (const Projection& one : projections)
        if (!is_plain(*one.linear)) finish_parts(pool, *one.linear, n_tokens, one.y, [](std::size_t, std::size_t) {});
    if (ranks) add_changes(kernels, pool, n_tokens, projections, low);
}

void gate_up(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Norm& norm,
             const GateUp& gating, float* y) {
    const std::size_t width = gating.up.matrix->n_out, n = n_tokens * width;
    if (n == 0) return;
    const bool has_gate = gating.gate.matrix;
    float* other = has_gate ? gate_scratch.buffer<float>(n) : nullptr;
    const Projection projections[2] = {{&gating.up, has_gate ? other : y}, {&gating.gate, y}};
    project(kernels, pool, x, n_tokens, norm, {projections, has_gate ? 2u : 1u});
    if (!gating.threshold) return activate(kernels, pool, y, other, n, gating.activation, y);
    in_parts(pool, n, width, [&](std::size_t begin, std::size_t end) {
        for (std::size_t at = begin; at < end; at += width) {
            kernels.gaussian_topk(y + at, width, *gating.threshold);
            kernels.activate(gating.activation, y + at, other + at, width, y + at);
        }
    });
}

void activate(const IsaKernels& kernels, Pool& pool, const float* gate, const float* up, std::size_t n,
              const Activation& activation, float* y) {
    in_parts(pool, n, 1, [&](std::size_t begin, std::size_t end) {
        kernels.activate(activation, gate + begin, up ? up + begin : nullptr, end - begin, y + begin);
    });
}

void add_shares(const IsaKernels& kernels, Pool& pool, const float* x, std::span<const float* const> parts,
                const float* shares, std::size_t stride, std::size_t n_tokens, std::size_t width, float* y) {
    in_parts(pool, n_tokens * width, width, [&](std::size_t begin, std::size_t end) {
        std::vector<const float*> rows(parts.size());
        for (std::size_t at = begin; at < end; at += width) {
            std::transform(parts.begin(), parts.end(), rows.begin(), [at](const float* part) { return part + at; });
            kernels.add_parts(x + at, rows.data(), shares + at / width * stride, rows.size(), width, y + at);
        }
    });
}

void add_product(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Linear& linear,
                 const float* residual, float* y) {
    if (n_tokens * linear.matrix->n_out == 0) return;
    const Linear rest = make(kernels, pool, x, n_tokens, linear, y);
    finish_parts(pool, rest, n_tokens, y, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) y[i] += residual[i];
    });
}

void add_normed(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Linear& linear,
                const Norm& norm, float scale, const float* residual, float* y) {
    const std::size_t width = linear.matrix->n_out;
    if (n_tokens * width == 0) return;
    const Linear rest = make(kernels, pool, x, n_tokens, linear, y);
    finish_parts(pool, rest, n_tokens, y, [&](std::size_t begin, std::size_t end) {
        if (norm.weight) kernels.normalize(norm, y + begin, (end - begin) / width, y + begin);
        for (std::size_t i = begin; i < end; ++i) y[i] = residual[i] + scale * y[i];
    });
}

void rotate_heads(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, std::size_t n_heads,
                  std::size_t width, const Norm& norm, Rotation rotation, float* y) {
    const std::size_t per_token = n_heads * width;
    if (n_tokens * per_token == 0) return;
    in_parts(pool, n_tokens * per_token, per_token, [&](std::size_t begin, std::size_t end) {
        if (norm.weight) kernels.normalize(norm, x + begin, (end - begin) / norm.width, y + begin);
        else if (y != x) std::memcpy(y + begin, x + begin, (end - begin) * sizeof(float));
        if (rotation.half == 0) return;
        for (std::size_t t = begin / per_token; t < end / per_token; ++t)
            kernels.rotate(y + t * per_token, n_heads, width, rotation.cos + t * rotation.half,
                           rotation.sin + t * rotation.half, rotation.half, rotation.interleaved);
    });
}

}  // namespace slm
