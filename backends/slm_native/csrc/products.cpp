#include "products.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace slm {

namespace {

constexpr std::size_t few_tokens = 6;          // up to here weights are taken apart for each pass over the tokens
constexpr std::size_t panel_rows = 32;         // a panel and a column of activations stay in the second-level cache
constexpr std::size_t least_task_bytes = 1 << 14;

// Of each thread; activations belong to the thread that called, panels to whoever computes.
thread_local Scratch spans_scratch, packed_scratch, panel_scratch, normed_scratch, gate_scratch;

std::size_t div_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

Rows rows_of(const Matrix& m) {
    const std::size_t n_spans = m.n_in / span_weights, per_span = span_weights / std::size_t(m.format->block);
    return {m.data, m.row_bytes, n_spans, m.row_bytes - n_spans * per_span * m.format->block_bytes};
}

// Rows of one of several products.
struct Share {
    std::size_t product, begin, end;
};

// Cuts the rows of products into shares that shrink: threads get long straight lines to read first, and there is little
// to wait for at the end.
std::vector<Share> shares_of(const Pool& pool, std::span<const Product> products) {
    std::size_t left = 0;
    for (const Product& p : products) left += p.matrix->n_out * p.matrix->row_bytes;
    std::vector<Share> shares;
    for (std::size_t i = 0; i < products.size(); ++i) {
        const Matrix& m = *products[i].matrix;
        for (std::size_t begin = 0, n; begin < m.n_out; begin += n) {
            const std::size_t bytes = std::max(least_task_bytes, left / (2 * std::size_t(pool.n_threads())));
            n = std::clamp<std::size_t>(bytes / m.row_bytes, 1, m.n_out - begin);
            shares.push_back({i, begin, begin + n});
            left -= n * m.row_bytes;
        }
    }
    return shares;
}

template <class Task>
void run_by_rows(Pool& pool, std::span<const Product> products, const Task& task) {
    const std::vector<Share> shares = shares_of(pool, products);
    pool.run(shares.size(), [&](std::size_t i) { task(shares[i].product, shares[i].begin, shares[i].end); });
}

void multiply_few(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens,
                  std::span<const Product> products) {
    const std::size_t n_in = products[0].matrix->n_in, n_spans = div_up(n_in, span_weights);
    std::vector<int> zeros;  // activations are rounded once for all matrices whose sums begin alike
    for (const Product& p : products)
        if (p.matrix->format && std::find(zeros.begin(), zeros.end(), p.matrix->format->start_zero) == zeros.end())
            zeros.push_back(p.matrix->format->start_zero);
    Span* spans = spans_scratch.room<Span>(zeros.size() * n_tokens * n_spans);
    for (std::size_t z = 0; z < zeros.size(); ++z)
        for (std::size_t t = 0; t < n_tokens; ++t)
            kernels.quantize(x + t * n_in, n_in, zeros[z], spans + (z * n_tokens + t) * n_spans);
    run_by_rows(pool, products, [&](std::size_t i, std::size_t begin, std::size_t end) {
        const Matrix& m = *products[i].matrix;
        if (m.floats) {
            m.floats->rows(m.data, n_in, begin, end, x, n_tokens, products[i].y, m.n_out);
            return;
        }
        const std::size_t z = std::size_t(std::find(zeros.begin(), zeros.end(), m.format->start_zero) - zeros.begin());
        m.format->rows(rows_of(m), begin, end, spans + z * n_tokens * n_spans, n_spans, n_tokens, products[i].y, m.n_out);
    });
}

std::size_t padded(std::size_t n_in) { return div_up(n_in, span_weights) * span_weights; }

void multiply_many_floats(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Product& product) {
    const Matrix& m = *product.matrix;
    const std::size_t lanes = std::size_t(kernels.lanes), n_vectors = div_up(n_tokens, lanes);
    float* packed = packed_scratch.room<float>(n_vectors * m.n_in * lanes);
    pool.run(n_vectors, [&](std::size_t v) {
        kernels.pack_floats(x + v * lanes * m.n_in, std::min(lanes, n_tokens - v * lanes), m.n_in, packed + v * m.n_in * lanes);
    });
    pool.run(div_up(m.n_out, panel_rows), [&](std::size_t i) {
        const std::size_t begin = i * panel_rows, end = std::min(begin + panel_rows, m.n_out);
        float* panel = panel_scratch.room<float>(panel_rows * (m.n_in + 4 * lanes));
        float* work = panel + panel_rows * m.n_in;
        m.floats->expand(m.data + begin * m.row_bytes, (end - begin) * m.n_in, panel);
        kernels.float_tiles(panel, end - begin, m.n_in, packed, n_vectors, n_tokens, work, product.y + begin, m.n_out);
    });
}

PackedRows pack_rows(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Matrix& m) {
    const FormatKernels& format = *m.format;
    const std::size_t lanes = std::size_t(kernels.lanes), n_vectors = div_up(n_tokens, lanes), n_in = padded(m.n_in);
    const std::size_t n_groups = n_in / span_weights * std::size_t(format.groups), n_q = n_vectors * n_in * lanes;
    auto* memory = packed_scratch.room<std::int8_t>(n_q + 4 * n_vectors * lanes * (n_in / 32 + 2 * n_groups));
    PackedRows packed{n_vectors, n_in, memory, reinterpret_cast<float*>(memory + n_q), nullptr, nullptr};
    packed.start = reinterpret_cast<std::int32_t*>(packed.scale + n_vectors * lanes * (n_in / 32));
    packed.sum = reinterpret_cast<float*>(packed.start + n_vectors * lanes * n_groups);
    pool.run(n_vectors, [&](std::size_t v) {
        kernels.pack(x + v * lanes * m.n_in, std::min(lanes, n_tokens - v * lanes), m.n_in, format.start_zero, format.groups,
                     packed, v);
    });
    return packed;
}

// Whether two products take their tokens packed alike.
bool packed_alike(const Matrix& a, const Matrix& b) {
    return a.format && b.format && a.format->groups == b.format->groups && a.format->start_zero == b.format->start_zero;
}

// Products of the same packed rows, a panel at a time.
void multiply_packed(Pool& pool, const PackedRows& x, std::size_t n_tokens, std::size_t lanes, std::span<const Product> products) {
    std::vector<Share> panels;
    for (std::size_t i = 0; i < products.size(); ++i)
        for (std::size_t begin = 0; begin < products[i].matrix->n_out; begin += panel_rows)
            panels.push_back({i, begin, std::min(begin + panel_rows, products[i].matrix->n_out)});
    pool.run(panels.size(), [&](std::size_t number) {
        const Share& share = panels[number];
        const Matrix& m = *products[share.product].matrix;
        const std::size_t n_factors = x.n_in / span_weights * std::size_t(m.format->groups * (m.format->has_min ? 2 : 1));
        auto* memory = panel_scratch.room<std::uint8_t>(panel_rows * (x.n_in + 4 * n_factors + 16 * lanes));
        Panel panel{share.end - share.begin, x.n_in, memory, reinterpret_cast<float*>(memory + panel_rows * x.n_in), nullptr, 0};
        if (const std::size_t later = number + std::size_t(pool.n_threads()); later < panels.size()) {
            const Matrix& next = *products[panels[later].product].matrix;
            panel.next = next.data + panels[later].begin * next.row_bytes;
            panel.next_bytes = (panels[later].end - panels[later].begin) * next.row_bytes;
        }
        m.format->expand(rows_of(m), share.begin, share.end, panel);
        m.format->tiles(panel, x, n_tokens, panel.factors + panel_rows * n_factors, products[share.product].y + share.begin, m.n_out);
    });
}

void multiply_many(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, std::span<const Product> products) {
    for (std::size_t i = 0, n = 1; i < products.size(); i += n, n = 1) {
        const Matrix& m = *products[i].matrix;
        if (m.floats) {
            multiply_many_floats(kernels, pool, x, n_tokens, products[i]);
            continue;
        }
        while (i + n < products.size() && packed_alike(m, *products[i + n].matrix)) ++n;
        const PackedRows packed = pack_rows(kernels, pool, x, n_tokens, m);
        multiply_packed(pool, packed, n_tokens, std::size_t(kernels.lanes), products.subspan(i, n));
    }
}

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

Scratch::~Scratch() { std::free(memory_); }

void* Scratch::bytes(std::size_t n) {
    if (n > size_) {
        std::free(memory_);
        size_ = 0;
        memory_ = std::aligned_alloc(64, (n + 63) / 64 * 64);
        if (!memory_) throw std::bad_alloc();
        size_ = n;
    }
    return memory_;
}

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
    if (n_tokens <= few_tokens) return multiply_few(kernels, pool, x, n_tokens, products);
    multiply_many(kernels, pool, x, n_tokens, products);
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
