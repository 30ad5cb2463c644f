#include "multiply.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>

namespace slm {

namespace {

constexpr std::size_t few_rows = 6;     // of activations: up to here weights are taken apart for each pass over them
constexpr std::size_t panel_rows = 32;  // a panel and a column of activations stay in the second-level cache
constexpr std::size_t least_task_bytes = 1 << 14;
constexpr std::size_t least_shared = 1 << 13;  // activations; fewer are rounded before a thread has heard of it

// Of each thread; inputs belong to the thread that called, what else there is to whoever computes.
thread_local Scratch inputs_scratch, gather_scratch, panel_scratch;

std::size_t div_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }
std::size_t padded(std::size_t n_in) { return div_up(n_in, span_weights) * span_weights; }

bool is_few(const Multiplication& p) { return p.n_rows <= few_rows; }

// Activations as the kernels take them: spans or packed rows for quantized weights, for others packed floats, or, of
// few, rows as they are.
struct Input {
    const Multiplication* of;  // one of the products that take them so
    std::size_t n_vectors, bytes;
    Span* spans;
    float* floats;
    PackedRows rows;
};

bool same_rows(const Multiplication& a, const Multiplication& b) {
    if (a.x != b.x || a.n_rows != b.n_rows || a.matrix->n_in != b.matrix->n_in) return false;
    if (a.x_stride != b.x_stride || a.source != b.source) return false;
    return a.which == b.which || (a.which && b.which && std::equal(a.which, a.which + a.n_rows, b.which));
}

// Whether two products take the same activations alike.
bool alike(const Multiplication& a, const Multiplication& b) {
    if (!same_rows(a, b)) return false;
    const FormatKernels *f = a.matrix->format, *g = b.matrix->format;
    if (!f || !g) return !f && !g;
    return f->start_zero == g->start_zero && (is_few(a) || f->groups == g->groups);
}

// What the parts of packed rows take.
struct PackedSizes {
    std::size_t q, scales, groups;

    PackedSizes(const Multiplication& p, std::size_t n_vectors, std::size_t lanes) {
        const std::size_t n_in = padded(p.matrix->n_in), n = n_vectors * lanes;
        q = n * n_in, scales = n * (n_in / 32);
        groups = n * (n_in / span_weights) * std::size_t(p.matrix->format->groups);
    }
    std::size_t bytes() const { return q + 4 * (scales + 2 * groups); }
};

Input input_of(const Multiplication& p, std::size_t lanes) {
    Input input{&p, is_few(p) ? 0 : div_up(p.n_rows, lanes), 0, nullptr, nullptr, {}};
    const std::size_t n_in = p.matrix->n_in;
    if (p.matrix->floats) input.bytes = 4 * n_in * (is_few(p) ? (p.follow_each_other() ? 0 : p.n_rows) : input.n_vectors * lanes);
    else if (is_few(p)) input.bytes = p.n_rows * div_up(n_in, span_weights) * sizeof(Span);
    else input.bytes = PackedSizes(p, input.n_vectors, lanes).bytes();
    return input;
}

void place(Input& input, std::uint8_t* memory, std::size_t lanes) {
    const Multiplication& p = *input.of;
    if (p.matrix->floats) {
        input.floats = reinterpret_cast<float*>(memory);
    } else if (is_few(p)) {
        input.spans = reinterpret_cast<Span*>(memory);
    } else {
        const PackedSizes sizes(p, input.n_vectors, lanes);
        input.rows = {input.n_vectors, padded(p.matrix->n_in), p.matrix->n_in, reinterpret_cast<std::int8_t*>(memory),
                      reinterpret_cast<float*>(memory + sizes.q), nullptr, nullptr};
        input.rows.start = reinterpret_cast<std::int32_t*>(input.rows.scale + sizes.scales);
        input.rows.sum = reinterpret_cast<float*>(input.rows.start + sizes.groups);
    }
}

// Rows [begin, end) of the activations, side by side.
const float* rows_from(const Multiplication& p, std::size_t begin, std::size_t end) {
    const std::size_t n_in = p.matrix->n_in;
    if (p.follow_each_other() || (end - begin == 1 && !p.source)) return p.row(begin);
    float* to = gather_scratch.room<float>((end - begin) * n_in);
    for (std::size_t i = begin; i < end; ++i) {
        if (p.source) p.source->make(i, to + (i - begin) * n_in);
        else std::copy_n(p.row(i), n_in, to + (i - begin) * n_in);
    }
    return to;
}

// Pack vector `i` of many, of weights in this format.
void pack(const IsaKernels& kernels, const FormatKernels& format, Input& input, std::size_t i) {
    const Multiplication& p = *input.of;
    const std::size_t lanes = std::size_t(kernels.lanes), begin = i * lanes, n_here = std::min(lanes, p.n_rows - begin);
    const float *made = p.source ? rows_from(p, begin, begin + n_here) : nullptr, *rows[most_lanes];
    for (std::size_t t = 0; t < n_here; ++t) rows[t] = made ? made + t * p.matrix->n_in : p.row(begin + t);
    kernels.pack(rows, n_here, p.matrix->n_in, format.start_zero, format.groups, input.rows, i);
}

// Round or copy row `i` of few, or pack vector `i` of many.
void fill(const IsaKernels& kernels, Input& input, std::size_t i) {
    const Multiplication& p = *input.of;
    const FormatKernels* format = p.matrix->format;
    if (!is_few(p) && format) return pack(kernels, *format, input, i);
    const std::size_t n_in = p.matrix->n_in, lanes = std::size_t(kernels.lanes), step = is_few(p) ? 1 : lanes;
    const std::size_t begin = i * step, n_here = std::min(step, p.n_rows - begin);
    const float* x = rows_from(p, begin, begin + n_here);
    if (is_few(p) && !format) std::copy_n(x, n_in, input.floats + i * n_in);
    else if (is_few(p)) kernels.quantize(x, n_in, format->start_zero, input.spans + i * div_up(n_in, span_weights));
    else kernels.pack_floats(x, n_here, n_in, input.floats + i * n_in * lanes);
}

// A row or a vector of an input.
struct Piece {
    std::size_t input, index;
};

// All inputs of some products, and which of them each product takes.
class Inputs {
public:
    Inputs(const IsaKernels& kernels, Pool& pool, std::span<const Multiplication> products) {
        const std::size_t lanes = std::size_t(kernels.lanes);
        for (const Multiplication& p : products) {
            // From the last: products that have activations in common follow each other.
            const auto takes = [&](const Input& input) { return alike(*input.of, p); };
            const auto found = std::find_if(inputs_.rbegin(), inputs_.rend(), takes);
            of_.push_back(std::size_t(inputs_.rend() - found) - 1);
            if (found != inputs_.rend()) continue;
            of_.back() = inputs_.size();
            inputs_.push_back(input_of(p, lanes));
        }
        const auto room_of = [](const Input& input) { return div_up(input.bytes, 64) * 64; };
        std::size_t bytes = 0, n_values = 0;
        for (const Input& input : inputs_)
            bytes += room_of(input), n_values += input.of->n_rows * input.of->matrix->n_in;
        auto* memory = inputs_scratch.room<std::uint8_t>(bytes);
        std::vector<Piece> pieces;
        for (std::size_t i = 0; i < inputs_.size(); ++i) {
            place(inputs_[i], memory, lanes);
            memory += room_of(inputs_[i]);
            for (std::size_t k = 0; k < n_pieces(inputs_[i]); ++k) pieces.push_back({i, k});
        }
        const auto fill_piece = [&](std::size_t i) { fill(kernels, inputs_[pieces[i].input], pieces[i].index); };
        if (n_values >= least_shared) pool.run(pieces.size(), fill_piece);
        else
            for (std::size_t i = 0; i < pieces.size(); ++i) fill_piece(i);
    }

    const Input& of(std::size_t product) const { return inputs_[of_[product]]; }

private:
    static std::size_t n_pieces(const Input& input) {
        if (!is_few(*input.of)) return input.n_vectors;
        return input.of->matrix->format || !input.of->follow_each_other() ? input.of->n_rows : 0;
    }

    std::vector<Input> inputs_;
    std::vector<std::size_t> of_;  // [products]
};

// Rows of the matrix of one product.
struct Share {
    std::size_t product, begin, end;
};

// Products of many rows a panel at a time; then the matrices of the others in shares that shrink: threads get long
// straight lines to read first, and there is little to wait for at the end.
std::vector<Share> shares_of(const Pool& pool, std::span<const Multiplication> products) {
    std::vector<Share> shares;
    std::size_t left = 0;
    for (std::size_t i = 0; i < products.size(); ++i) {
        const Matrix& m = *products[i].matrix;
        if (is_few(products[i])) left += m.n_out * m.row_bytes;
        else
            for (std::size_t begin = 0; begin < m.n_out; begin += panel_rows)
                shares.push_back({i, begin, std::min(begin + panel_rows, m.n_out)});
    }
    for (std::size_t i = 0; i < products.size(); ++i) {
        const Matrix& m = *products[i].matrix;
        for (std::size_t begin = 0, n; is_few(products[i]) && begin < m.n_out; begin += n) {
            const std::size_t bytes = std::max(least_task_bytes, left / (2 * std::size_t(pool.n_threads())));
            n = std::clamp<std::size_t>(bytes / m.row_bytes, 1, m.n_out - begin);
            shares.push_back({i, begin, begin + n});
            left -= n * m.row_bytes;
        }
    }
    return shares;
}

void multiply_few(const Multiplication& p, const Input& input, const Share& share) {
    const Matrix& m = *p.matrix;
    const std::size_t begin = share.begin, end = share.end, n_spans = div_up(m.n_in, span_weights);
    if (m.format) return m.format->rows(rows_of(m), begin, end, input.spans, n_spans, p.n_rows, p.y, p.to_next());
    m.floats->rows(m.data, m.n_in, begin, end, p.follow_each_other() ? p.x : input.floats, p.n_rows, p.y, p.to_next());
}

void multiply_many_floats(const IsaKernels& kernels, const Multiplication& p, const Input& input, const Share& share) {
    const Matrix& m = *p.matrix;
    const std::size_t lanes = std::size_t(kernels.lanes), n_here = share.end - share.begin;
    float* panel = panel_scratch.room<float>(panel_rows * (m.n_in + 4 * lanes));
    m.floats->expand(m.data + share.begin * m.row_bytes, n_here * m.n_in, panel);
    kernels.float_tiles(panel, n_here, m.n_in, input.floats, input.n_vectors, p.n_rows, panel + panel_rows * m.n_in,
                        p.y + share.begin, p.to_next());
}

// `next` is a share that will be taken apart later, or null.
void multiply_many(const IsaKernels& kernels, const Multiplication& p, const Input& input, const Share& share,
                   const Share* next, const Matrix* next_matrix) {
    const Matrix& m = *p.matrix;
    const std::size_t n_in = input.rows.n_in, lanes = std::size_t(kernels.lanes);
    const std::size_t n_factors = n_in / span_weights * std::size_t(m.format->groups * (m.format->has_min ? 2 : 1));
    auto* memory = panel_scratch.room<std::uint8_t>(panel_rows * (n_in + 4 * n_factors + 16 * lanes));
    auto* factors = reinterpret_cast<float*>(memory + panel_rows * n_in);
    Panel panel{share.end - share.begin, n_in, memory, factors, nullptr, 0};
    if (next) {
        panel.next = next_matrix->data + next->begin * next_matrix->row_bytes;
        panel.next_bytes = (next->end - next->begin) * next_matrix->row_bytes;
    }
    m.format->expand(rows_of(m), share.begin, share.end, panel);
    m.format->tiles(panel, input.rows, p.n_rows, panel.factors + panel_rows * n_factors, p.y + share.begin, p.to_next());
}

}  // namespace

Rows rows_of(const Matrix& m) {
    const std::size_t n_spans = m.n_in / span_weights, per_span = span_weights / std::size_t(m.format->block);
    return {m.data, m.row_bytes, n_spans, m.row_bytes - n_spans * per_span * m.format->block_bytes};
}

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

void multiply_all(const IsaKernels& kernels, Pool& pool, std::span<const Multiplication> products) {
    const Inputs inputs(kernels, pool, products);
    const std::vector<Share> shares = shares_of(pool, products);
    pool.run(shares.size(), [&](std::size_t i) {
        const Share& share = shares[i];
        const Multiplication& p = products[share.product];
        const Input& input = inputs.of(share.product);
        if (is_few(p)) return multiply_few(p, input, share);
        if (p.matrix->floats) return multiply_many_floats(kernels, p, input, share);
        const std::size_t later = i + std::size_t(pool.n_threads());
        const Share* next = later < shares.size() ? &shares[later] : nullptr;
        multiply_many(kernels, p, input, share, next, next ? products[next->product].matrix : nullptr);
    });
}

void multiply_by_head(const IsaKernels& kernels, Pool& pool, const HeadRows& x, std::size_t n_tokens,
                      std::span<const Matrix* const> matrices, float* y, std::size_t y_stride) {
    const std::size_t n = matrices.size();
    std::vector<Multiplication> products;
    for (std::size_t i = 0; i < n; ++i)
        products.push_back({matrices[i], x.at + i * x.stride, n_tokens, y + i * y_stride, nullptr, n * x.stride, n * y_stride});
    multiply_all(kernels, pool, products);
}

}  // namespace slm
