#include "matmul/multiply.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>

namespace slm {

namespace {

// Rows of activations up to which weights are taken apart for each pass over them, codes and numbers.
constexpr std::size_t few_rows = 6, few_float_rows = 32;
constexpr std::size_t few_outputs = 16;  // of numbers: up to here they stay near by for all rows, which need not be packed
constexpr std::size_t panel_rows = 32;  // a panel and a column of activations stay in the second-level cache
constexpr std::size_t bf16_rows = 48;   // so do these; kernels take six at once
constexpr std::size_t least_task_bytes = 1 << 14;
constexpr std::size_t least_shared = 1 << 13;  // activations; fewer are rounded before a thread has heard of it

// Of each thread; inputs belong to the thread that called, what else there is to whoever computes.
thread_local Scratch inputs_scratch, gather_scratch, panel_scratch;

std::size_t div_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }
std::size_t padded(std::size_t n_in) { return div_up(n_in, span_weights) * span_weights; }
std::size_t tile_of(std::size_t n_in) { return div_up(n_in, 32) * 32 * 16; }  // 16 rows of activations

// What the kernels take activations as. Codes: few rows and many; float32: rows as they are, copies of some of them,
// and many side by side; bf16, row by row and in tiles.
enum class Taken { as_spans, as_packed_rows, as_they_are, as_copies, as_vectors, as_bf16, as_tiles };

Taken taken(const IsaKernels& kernels, const Multiplication& p) {
    const bool few = p.n_rows <= few_rows;
    const bool fits_bf16 = p.matrix->format || p.matrix->floats->rows_of_bf16;  // F16 and F32 have digits that would be lost
    if (kernels.unit && !few && fits_bf16) return Taken::as_tiles;
    if (p.matrix->format) return few ? Taken::as_spans : Taken::as_packed_rows;
    if (p.matrix->floats->rows_of_bf16 && !few) return Taken::as_bf16;
    if (p.n_rows > few_float_rows && p.matrix->n_out > few_outputs) return Taken::as_vectors;
    return p.follow_each_other() ? Taken::as_they_are : Taken::as_copies;
}

bool side_by_side(Taken taken) {
    return taken == Taken::as_packed_rows || taken == Taken::as_vectors || taken == Taken::as_tiles;
}

// Activations as the kernels take them.
struct Input {
    const Multiplication* of;  // one of the products that take them so
    Taken taken;
    std::size_t n_pieces, bytes;  // rows, or vectors of them
    std::uint8_t* memory;
    PackedRows rows;
};

bool same_rows(const Multiplication& a, const Multiplication& b) {
    if (a.x != b.x || a.n_rows != b.n_rows || a.matrix->n_in != b.matrix->n_in) return false;
    if (a.x_stride != b.x_stride || a.source != b.source) return false;
    return a.which == b.which || (a.which && b.which && std::equal(a.which, a.which + a.n_rows, b.which));
}

// Whether two products take the same activations alike.
bool alike(const IsaKernels& kernels, const Multiplication& a, const Multiplication& b) {
    const Taken as = taken(kernels, a);
    if (!same_rows(a, b) || as != taken(kernels, b)) return false;
    const FormatKernels *f = a.matrix->format, *g = b.matrix->format;
    if (as != Taken::as_spans && as != Taken::as_packed_rows) return true;
    return f->start_zero == g->start_zero && (as == Taken::as_spans || f->groups == g->groups);
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

std::size_t bytes_of(const Multiplication& p, Taken taken, std::size_t n_pieces, std::size_t lanes) {
    const std::size_t n_in = p.matrix->n_in;
    switch (taken) {
        case Taken::as_spans: return n_pieces * div_up(n_in, span_weights) * sizeof(Span);
        case Taken::as_packed_rows: return PackedSizes(p, n_pieces, lanes).bytes();
        case Taken::as_copies: return n_pieces * n_in * sizeof(float);
        case Taken::as_vectors: return n_pieces * lanes * n_in * sizeof(float);
        case Taken::as_bf16: return n_pieces * n_in * sizeof(std::uint16_t);
        case Taken::as_tiles: return n_pieces * tile_of(n_in) * sizeof(std::uint16_t);
        default: return 0;
    }
}

Input input_of(const IsaKernels& kernels, const Multiplication& p) {
    const Taken as = taken(kernels, p);
    const auto lanes = std::size_t(kernels.lanes);
    const std::size_t n_pieces = as == Taken::as_they_are ? 0 : side_by_side(as) ? div_up(p.n_rows, lanes) : p.n_rows;
    return {&p, as, n_pieces, bytes_of(p, as, n_pieces, lanes), nullptr, {}};
}

void place(Input& input, std::uint8_t* memory, std::size_t lanes) {
    const Multiplication& p = *input.of;
    input.memory = memory;
    if (input.taken != Taken::as_packed_rows) return;
    const PackedSizes sizes(p, input.n_pieces, lanes);
    input.rows = {input.n_pieces, padded(p.matrix->n_in), p.matrix->n_in, reinterpret_cast<std::int8_t*>(memory),
                  reinterpret_cast<float*>(memory + sizes.q), nullptr, nullptr};
    input.rows.start = reinterpret_cast<std::int32_t*>(input.rows.scale + sizes.scales);
    input.rows.sum = reinterpret_cast<float*>(input.rows.start + sizes.groups);
}

Span* spans_of(const Input& input) { return reinterpret_cast<Span*>(input.memory); }
float* floats_of(const Input& input) { return reinterpret_cast<float*>(input.memory); }
std::uint16_t* bf16_of(const Input& input) { return reinterpret_cast<std::uint16_t*>(input.memory); }

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

// Pack vector `i` of many.
void pack(const IsaKernels& kernels, Input& input, std::size_t i) {
    const Multiplication& p = *input.of;
    const std::size_t lanes = std::size_t(kernels.lanes), begin = i * lanes, n_here = std::min(lanes, p.n_rows - begin);
    const float *made = p.source ? rows_from(p, begin, begin + n_here) : nullptr, *rows[most_lanes];
    for (std::size_t t = 0; t < n_here; ++t) rows[t] = made ? made + t * p.matrix->n_in : p.row(begin + t);
    const std::size_t n_in = p.matrix->n_in;
    if (input.taken == Taken::as_tiles) return kernels.unit->pack(rows, n_here, n_in, bf16_of(input) + i * tile_of(n_in));
    const FormatKernels& format = *p.matrix->format;
    kernels.pack(rows, n_here, n_in, format.start_zero, format.groups, input.rows, i);
}

// Round or copy row `i`, or pack vector `i`.
void fill(const IsaKernels& kernels, Input& input, std::size_t i) {
    const Multiplication& p = *input.of;
    const std::size_t n_in = p.matrix->n_in, lanes = std::size_t(kernels.lanes);
    const std::size_t step = side_by_side(input.taken) ? lanes : 1, begin = i * step, n_here = std::min(step, p.n_rows - begin);
    if (input.taken == Taken::as_packed_rows || input.taken == Taken::as_tiles) return pack(kernels, input, i);
    const float* x = rows_from(p, begin, begin + n_here);
    switch (input.taken) {
        case Taken::as_spans:
            return kernels.quantize(x, n_in, p.matrix->format->start_zero, spans_of(input) + i * div_up(n_in, span_weights));
        case Taken::as_copies: std::copy_n(x, n_in, floats_of(input) + i * n_in); return;
        case Taken::as_vectors: return kernels.pack_floats(x, n_here, n_in, floats_of(input) + i * lanes * n_in);
        case Taken::as_bf16: return kernels.round_to_bf16(x, n_in, bf16_of(input) + i * n_in);
        default: return;  // there is nothing to make
    }
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
            const auto takes = [&](const Input& input) { return alike(kernels, *input.of, p); };
            const auto found = std::find_if(inputs_.rbegin(), inputs_.rend(), takes);
            of_.push_back(std::size_t(inputs_.rend() - found) - 1);
            if (found != inputs_.rend()) continue;
            of_.back() = inputs_.size();
            inputs_.push_back(input_of(kernels, p));
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
            for (std::size_t k = 0; k < inputs_[i].n_pieces; ++k) pieces.push_back({i, k});
        }
        const auto fill_piece = [&](std::size_t i) { fill(kernels, inputs_[pieces[i].input], pieces[i].index); };
        if (n_values >= least_shared) pool.run(pieces.size(), fill_piece);
        else
            for (std::size_t i = 0; i < pieces.size(); ++i) fill_piece(i);
    }

    const Input& of(std::size_t product) const { return inputs_[of_[product]]; }

private:
    std::vector<Input> inputs_;
    std::vector<std::size_t> of_;  // [products]
};

// Rows of the matrix of one product.
struct Share {
    std::size_t product, begin, end;
};

// Whether each row of weights is read from memory to its end, and then not again.
bool reads_lines(const IsaKernels& kernels, const Multiplication& p) {
    return taken(kernels, p) != Taken::as_tiles && p.n_rows <= (p.matrix->format ? few_rows : few_float_rows);
}

// Rows of weights whose panels a thread takes apart together: many, but so that there is work for all threads to the end.
std::size_t tiled_rows(const Pool& pool, std::span<const Multiplication> products) {
    std::size_t n_rows = 0;
    for (const Multiplication& p : products) n_rows += p.matrix->n_out;
    const std::size_t n_panels = n_rows / (4 * std::size_t(pool.n_threads()) * tiled_panel);
    return std::clamp<std::size_t>(n_panels, 1, most_tiled_panels) * tiled_panel;
}

// Products of many rows a panel at a time; then the matrices of the others in shares that shrink: threads get long
// straight lines to read first, and there is little to wait for at the end.
std::vector<Share> shares_of(const IsaKernels& kernels, const Pool& pool, std::span<const Multiplication> products) {
    std::vector<Share> shares;
    std::size_t left = 0;
    for (std::size_t i = 0; i < products.size(); ++i) {
        const Matrix& m = *products[i].matrix;
        const Taken as = taken(kernels, products[i]);
        const std::size_t step = as == Taken::as_tiles ? tiled_rows(pool, products) : as == Taken::as_bf16 ? bf16_rows : panel_rows;
        if (reads_lines(kernels, products[i])) left += m.n_out * m.row_bytes;
        else
            for (std::size_t begin = 0; begin < m.n_out; begin += step)
                shares.push_back({i, begin, std::min(begin + step, m.n_out)});
    }
    for (std::size_t i = 0; i < products.size(); ++i) {
        const Matrix& m = *products[i].matrix;
        for (std::size_t begin = 0, n; reads_lines(kernels, products[i]) && begin < m.n_out; begin += n) {
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
    m.format->rows(rows_of(m), share.begin, share.end, spans_of(input), div_up(m.n_in, span_weights), p.n_rows, p.y, p.to_next());
}

void multiply_float_panel(const IsaKernels& kernels, const Multiplication& p, const Input& input, const Share& share) {
    const Matrix& m = *p.matrix;
    const std::size_t lanes = std::size_t(kernels.lanes), n_here = share.end - share.begin;
    float* panel = panel_scratch.room<float>(panel_rows * (m.n_in + 4 * lanes));
    m.floats->expand(m.data + share.begin * m.row_bytes, n_here * m.n_in, panel);
    kernels.float_tiles(panel, n_here, m.n_in, floats_of(input), input.n_pieces, p.n_rows, panel + panel_rows * m.n_in,
                        p.y + share.begin, p.to_next());
}

void multiply_floats(const IsaKernels& kernels, const Multiplication& p, const Input& input, const Share& share) {
    const Matrix& m = *p.matrix;
    if (input.taken == Taken::as_vectors) return multiply_float_panel(kernels, p, input, share);
    if (input.taken == Taken::as_bf16)
        return m.floats->rows_of_bf16(m.data, m.n_in, share.begin, share.end, bf16_of(input), p.n_rows, p.y, p.to_next());
    const float* x = input.taken == Taken::as_copies ? floats_of(input) : p.x;
    m.floats->rows(m.data, m.n_in, share.begin, share.end, x, p.n_rows, p.y, p.to_next());
}

void multiply_tiled(const TileKernels& unit, const Multiplication& p, const Input& input, const Share& share) {
    const Matrix& m = *p.matrix;
    const TiledWeights weights{m.format, m.format ? rows_of(m) : Rows{m.data, m.row_bytes, 0, 0}, m.n_in};
    auto* work = panel_scratch.room<std::uint8_t>(unit.work_bytes(m.n_in, p.n_rows));
    unit.multiply(weights, share.begin, share.end, bf16_of(input), p.n_rows, work, p.y + share.begin, p.to_next());
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
    const std::vector<Share> shares = shares_of(kernels, pool, products);
    pool.run(shares.size(), [&](std::size_t i) {
        const Share& share = shares[i];
        const Multiplication& p = products[share.product];
        const Input& input = inputs.of(share.product);
        if (input.taken == Taken::as_tiles) return multiply_tiled(*kernels.unit, p, input, share);
        if (p.matrix->floats) return multiply_floats(kernels, p, input, share);
        if (input.taken == Taken::as_spans) return multiply_few(p, input, share);
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
