#include "matmul/multiply.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>
#include <vector>

namespace slm {

namespace {

constexpr std::size_t few_bf16_rows = 6;    // with more rows of activations, BF16 weights use bf16 products
constexpr std::size_t few_float_rows = 32;  // with more, float weights are unpacked to panels
constexpr std::size_t few_outputs = 16;     // rows of float weights that stay in cache: activations are not packed
constexpr std::size_t panel_rows = 32;      // a panel and a column of activations fit in the L2 cache
constexpr std::size_t bf16_rows = 48;       // so does a panel of this many bf16 rows; kernels multiply six rows at once
constexpr std::size_t least_task_bytes = 1 << 14;
constexpr std::size_t least_shared = 1 << 13;  // activations; for fewer, waking a thread costs more

// inputs_scratch belongs to the calling thread, the others to each computing thread.
thread_local Scratch inputs_scratch, gather_scratch, panel_scratch;

std::size_t div_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }
std::size_t padded(std::size_t n_in) { return div_up(n_in, span_weights) * span_weights; }
std::size_t tile_of(std::size_t n_in) { return div_up(n_in, 32) * 32 * 16; }  // bf16 of 16 rows of activations

// The activations of one or several products, in the layout that the kernels read.
struct Input;
struct Task;

// The layout of activations. A piece is the result of one call: one row, or `lanes` rows side by side.
enum class ActivationLayout {
    spans,        // quantized weights, few rows: int8, 256 activations of a row at a time (Span)
    packed_rows,  // quantized weights, many rows: int8, side by side (PackedRows)
    in_place,     // float weights: float32 rows of the caller
    copied_rows,  // float weights: float32 rows that were gathered or computed
    float_lanes,  // float weights, many rows: float32, side by side [n_in][lanes]
    bf16_rows,    // BF16 weights, many rows: bf16
    bf16_tiles,   // many rows on a matrix unit: tiles of bf16
};

// The operations of a layout.
struct LayoutTraits {
    bool side_by_side;  // whether a piece has `lanes` rows
    std::size_t (*piece_bytes)(const Multiplication& product, std::size_t lanes);
    void (*fill)(const IsaKernels& kernels, Input& input, std::size_t piece);
    void (*multiply)(const Task& task);
};

const LayoutTraits& traits_of(ActivationLayout layout);

ActivationLayout layout_of(const IsaKernels& kernels, const Multiplication& p) {
    const bool few = p.n_rows <= (p.matrix->format ? p.matrix->format->few_rows : few_bf16_rows);
    const bool fits_bf16 = p.matrix->format || p.matrix->floats->rows_of_bf16;  // F16 and F32 would lose precision
    if (kernels.unit && !few && fits_bf16) return ActivationLayout::bf16_tiles;
    if (p.matrix->format) return few ? ActivationLayout::spans : ActivationLayout::packed_rows;
    if (p.matrix->floats->rows_of_bf16 && !few) return ActivationLayout::bf16_rows;
    if (p.n_rows > few_float_rows && p.matrix->n_out > few_outputs) return ActivationLayout::float_lanes;
    return p.follow_each_other() ? ActivationLayout::in_place : ActivationLayout::copied_rows;
}

struct Input {
    const Multiplication* of;  // one of the products that read it
    ActivationLayout layout;
    std::size_t n_pieces, bytes;
    std::uint8_t* memory;
    PackedRows rows;  // for ActivationLayout::packed_rows
};

// The addresses of the next blocks of weights, which are prefetched during a product.
struct NextWeights {
    const std::uint8_t* data;
    std::size_t bytes;
};

// Rows of the matrix of one product.
struct Share { std::size_t product, begin, end; };

// The product of one share.
struct Task {
    const IsaKernels& kernels;
    const Multiplication& product;
    const Input& input;
    const Share& share;
    NextWeights next;
};

bool same_rows(const Multiplication& a, const Multiplication& b) {
    if (a.x != b.x || a.n_rows != b.n_rows || a.matrix->n_in != b.matrix->n_in) return false;
    if (a.x_stride != b.x_stride || a.source != b.source) return false;
    return a.which == b.which || (a.which && b.which && std::equal(a.which, a.which + a.n_rows, b.which));
}

// Whether two products read the same activations in the same layout.
bool share_input(const IsaKernels& kernels, const Multiplication& a, const Multiplication& b) {
    const ActivationLayout layout = layout_of(kernels, a);
    if (!same_rows(a, b) || layout != layout_of(kernels, b)) return false;
    const FormatKernels *f = a.matrix->format, *g = b.matrix->format;
    if (layout != ActivationLayout::spans && layout != ActivationLayout::packed_rows) return true;
    return f->start_zero == g->start_zero && (layout == ActivationLayout::spans || f->groups == g->groups);
}

// Sizes of the arrays of packed rows.
struct PackedSizes {
    std::size_t q, scales, groups;

    PackedSizes(const Multiplication& p, std::size_t n_vectors, std::size_t lanes) {
        const std::size_t n_in = padded(p.matrix->n_in), n = n_vectors * lanes;
        q = n * n_in, scales = n * (n_in / 32);
        groups = n * (n_in / span_weights) * std::size_t(p.matrix->format->groups);
    }
    std::size_t bytes() const { return q + 4 * (scales + 2 * groups); }
};

Input input_of(const IsaKernels& kernels, const Multiplication& p) {
    const ActivationLayout layout = layout_of(kernels, p);
    const LayoutTraits& traits = traits_of(layout);
    const auto lanes = std::size_t(kernels.lanes);
    const std::size_t n_pieces = !traits.fill ? 0 : traits.side_by_side ? div_up(p.n_rows, lanes) : p.n_rows;
    return {&p, layout, n_pieces, n_pieces ? n_pieces * traits.piece_bytes(p, lanes) : 0, nullptr, {}};
}

void place(Input& input, std::uint8_t* memory, std::size_t lanes) {
    const Multiplication& p = *input.of;
    input.memory = memory;
    if (input.layout != ActivationLayout::packed_rows) return;
    const PackedSizes sizes(p, input.n_pieces, lanes);
    input.rows = {input.n_pieces,
                  padded(p.matrix->n_in),
                  p.matrix->n_in,
                  reinterpret_cast<std::int8_t*>(memory),
                  reinterpret_cast<float*>(memory + sizes.q),
                  nullptr,
                  nullptr};
    input.rows.start = reinterpret_cast<std::int32_t*>(input.rows.scale + sizes.scales);
    input.rows.sum = reinterpret_cast<float*>(input.rows.start + sizes.groups);
}

Span* spans_of(const Input& input) { return reinterpret_cast<Span*>(input.memory); }
float* floats_of(const Input& input) { return reinterpret_cast<float*>(input.memory); }
std::uint16_t* bf16_of(const Input& input) { return reinterpret_cast<std::uint16_t*>(input.memory); }

// Rows [begin, end) of the activations, contiguous.
const float* rows_from(const Multiplication& p, std::size_t begin, std::size_t end) {
    const std::size_t n_in = p.matrix->n_in;
    if (p.follow_each_other() || (end - begin == 1 && !p.source)) return p.row(begin);
    float* to = gather_scratch.buffer<float>((end - begin) * n_in);
    for (std::size_t i = begin; i < end; ++i) {
        if (p.source) p.source->make(i, to + (i - begin) * n_in);
        else std::copy_n(p.row(i), n_in, to + (i - begin) * n_in);
    }
    return to;
}

// Pointers to the rows of one vector; they need not be contiguous.
struct VectorRows {
    const float* rows[most_lanes];
    std::size_t n;

    VectorRows(const Multiplication& p, std::size_t vector, std::size_t lanes) {
        const std::size_t begin = vector * lanes;
        n = std::min(lanes, p.n_rows - begin);
        const float* computed = p.source ? rows_from(p, begin, begin + n) : nullptr;
        for (std::size_t t = 0; t < n; ++t) rows[t] = computed ? computed + t * p.matrix->n_in : p.row(begin + t);
    }
};

void fill_span_row(const IsaKernels& kernels, Input& input, std::size_t i) {
    const Matrix& m = *input.of->matrix;
    Span* to = spans_of(input) + i * div_up(m.n_in, span_weights);
    kernels.quantize(rows_from(*input.of, i, i + 1), m.n_in, m.format->start_zero, to);
}

void fill_packed_vector(const IsaKernels& kernels, Input& input, std::size_t i) {
    const FormatKernels& format = *input.of->matrix->format;
    const VectorRows from(*input.of, i, std::size_t(kernels.lanes));
    kernels.pack(from.rows, from.n, input.of->matrix->n_in, format.start_zero, format.groups, input.rows, i);
}

void fill_copied_row(const IsaKernels&, Input& input, std::size_t i) {
    const std::size_t n_in = input.of->matrix->n_in;
    std::copy_n(rows_from(*input.of, i, i + 1), n_in, floats_of(input) + i * n_in);
}

void fill_float_vector(const IsaKernels& kernels, Input& input, std::size_t i) {
    const std::size_t n_in = input.of->matrix->n_in, lanes = std::size_t(kernels.lanes), begin = i * lanes;
    const std::size_t n = std::min(lanes, input.of->n_rows - begin);
    kernels.pack_floats(rows_from(*input.of, begin, begin + n), n, n_in, floats_of(input) + i * lanes * n_in);
}

void fill_bf16_row(const IsaKernels& kernels, Input& input, std::size_t i) {
    const std::size_t n_in = input.of->matrix->n_in;
    kernels.round_to_bf16(rows_from(*input.of, i, i + 1), n_in, bf16_of(input) + i * n_in);
}

void fill_bf16_tile(const IsaKernels& kernels, Input& input, std::size_t i) {
    const std::size_t n_in = input.of->matrix->n_in;
    const VectorRows from(*input.of, i, std::size_t(kernels.lanes));
    kernels.unit->pack(from.rows, from.n, n_in, bf16_of(input) + i * tile_of(n_in));
}

// One piece of an input.
struct Piece { std::size_t input, index; };

// All inputs of some products, and the input of each product.
class Inputs {
public:
    Inputs(const IsaKernels& kernels, Pool& pool, std::span<const Multiplication> products) {
        const std::size_t lanes = std::size_t(kernels.lanes);
        for (const Multiplication& p : products) {
            // The search begins at the last input: products that share activations are adjacent.
            const auto fits = [&](const Input& input) { return share_input(kernels, *input.of, p); };
            const auto match = std::find_if(inputs_.rbegin(), inputs_.rend(), fits);
            of_.push_back(std::size_t(inputs_.rend() - match) - 1);
            if (match != inputs_.rend()) continue;
            of_.back() = inputs_.size();
            inputs_.push_back(input_of(kernels, p));
        }
        const auto aligned_bytes = [](const Input& input) { return div_up(input.bytes, 64) * 64; };
        std::size_t bytes = 0, n_values = 0;
        for (const Input& input : inputs_)
            bytes += aligned_bytes(input), n_values += input.of->n_rows * input.of->matrix->n_in;
        auto* memory = inputs_scratch.buffer<std::uint8_t>(bytes);
        std::vector<Piece> pieces;
        for (std::size_t i = 0; i < inputs_.size(); ++i) {
            place(inputs_[i], memory, lanes);
            memory += aligned_bytes(inputs_[i]);
            for (std::size_t k = 0; k < inputs_[i].n_pieces; ++k) pieces.push_back({i, k});
        }
        const auto fill_piece = [&](std::size_t i) {
            Input& input = inputs_[pieces[i].input];
            traits_of(input.layout).fill(kernels, input, pieces[i].index);
        };
        if (n_values >= least_shared) pool.run(pieces.size(), fill_piece);
        else
            for (std::size_t i = 0; i < pieces.size(); ++i) fill_piece(i);
    }

    const Input& of(std::size_t product) const { return inputs_[of_[product]]; }

private:
    std::vector<Input> inputs_;
    std::vector<std::size_t> of_;  // [products]
};

// Whether a product reads each row of weights from memory once, from begin to end.
bool streams_weights(const IsaKernels& kernels, const Multiplication& p) {
    return layout_of(kernels, p) != ActivationLayout::bf16_tiles &&
           p.n_rows <= (p.matrix->format ? p.matrix->format->few_rows : few_float_rows);
}

// Rows of weights per task on a matrix unit: several panels, but few enough that all threads have work until the end.
std::size_t tiled_rows(const Pool& pool, std::span<const Multiplication> products) {
    std::size_t n_rows = 0;
    for (const Multiplication& p : products) n_rows += p.matrix->n_out;
    const std::size_t n_panels = n_rows / (4 * std::size_t(pool.n_threads()) * tiled_panel);
    return std::clamp<std::size_t>(n_panels, 1, most_tiled_panels) * tiled_panel;
}

std::size_t panel_rows_of(ActivationLayout layout, const Pool& pool, std::span<const Multiplication> products) {
    if (layout == ActivationLayout::bf16_tiles) return tiled_rows(pool, products);
    return layout == ActivationLayout::bf16_rows ? bf16_rows : panel_rows;
}

// Products of many rows come first, one panel per share. The other matrices follow in shrinking shares: threads begin
// with long contiguous reads, and wait little for each other at the end.
std::vector<Share> shares_of(const IsaKernels& kernels, const Pool& pool, std::span<const Multiplication> products) {
    std::vector<Share> shares;
    std::size_t left = 0;
    for (std::size_t i = 0; i < products.size(); ++i) {
        const Matrix& m = *products[i].matrix;
        const std::size_t step = panel_rows_of(layout_of(kernels, products[i]), pool, products);
        if (streams_weights(kernels, products[i])) left += m.n_out * m.row_bytes;
        else
            for (std::size_t begin = 0; begin < m.n_out; begin += step)
                shares.push_back({i, begin, std::min(begin + step, m.n_out)});
    }
    for (std::size_t i = 0; i < products.size(); ++i) {
        const Matrix& m = *products[i].matrix;
        for (std::size_t begin = 0, n; streams_weights(kernels, products[i]) && begin < m.n_out; begin += n) {
            const std::size_t bytes = std::max(least_task_bytes, left / (2 * std::size_t(pool.n_threads())));
            n = std::clamp<std::size_t>(bytes / m.row_bytes, 1, m.n_out - begin);
            shares.push_back({i, begin, begin + n});
            left -= n * m.row_bytes;
        }
    }
    return shares;
}

void multiply_spans(const Task& task) {
    const Multiplication& p = task.product;
    const Matrix& m = *p.matrix;
    m.format->rows(rows_of(m), task.share.begin, task.share.end, spans_of(task.input), div_up(m.n_in, span_weights),
                   p.n_rows, p.y, p.to_next());
}

void multiply_packed_rows(const Task& task) {
    const Multiplication& p = task.product;
    const Matrix& m = *p.matrix;
    const std::size_t n_in = task.input.rows.n_in, lanes = std::size_t(task.kernels.lanes);
    const std::size_t n_factors = n_in / span_weights * std::size_t(m.format->groups * (m.format->has_min ? 2 : 1));
    auto* memory = panel_scratch.buffer<std::uint8_t>(panel_rows * (n_in + 4 * n_factors + 16 * lanes));
    auto* factors = reinterpret_cast<float*>(memory + panel_rows * n_in);
    Panel panel{task.share.end - task.share.begin, n_in, memory, factors, task.next.data, task.next.bytes};
    m.format->expand(rows_of(m), task.share.begin, task.share.end, panel);
    m.format->tiles(panel, task.input.rows, p.n_rows, panel.factors + panel_rows * n_factors, p.y + task.share.begin,
                    p.to_next());
}

void multiply_float_rows(const Task& task, const float* x) {
    const Multiplication& p = task.product;
    const Matrix& m = *p.matrix;
    m.floats->rows(m.data, m.n_in, task.share.begin, task.share.end, x, p.n_rows, p.y, p.to_next());
}

void multiply_in_place(const Task& task) { multiply_float_rows(task, task.product.x); }
void multiply_copied_rows(const Task& task) { multiply_float_rows(task, floats_of(task.input)); }

void multiply_float_lanes(const Task& task) {
    const Multiplication& p = task.product;
    const Matrix& m = *p.matrix;
    const std::size_t lanes = std::size_t(task.kernels.lanes), n_here = task.share.end - task.share.begin;
    float* panel = panel_scratch.buffer<float>(panel_rows * (m.n_in + 4 * lanes));
    m.floats->expand(m.data + task.share.begin * m.row_bytes, n_here * m.n_in, panel);
    task.kernels.float_tiles(panel, n_here, m.n_in, floats_of(task.input), task.input.n_pieces, p.n_rows,
                             panel + panel_rows * m.n_in, p.y + task.share.begin, p.to_next());
}

void multiply_bf16_rows(const Task& task) {
    const Multiplication& p = task.product;
    const Matrix& m = *p.matrix;
    m.floats->rows_of_bf16(m.data, m.n_in, task.share.begin, task.share.end, bf16_of(task.input), p.n_rows, p.y,
                           p.to_next());
}

void multiply_bf16_tiles(const Task& task) {
    const Multiplication& p = task.product;
    const Matrix& m = *p.matrix;
    const TileKernels& unit = *task.kernels.unit;
    const TiledWeights weights{m.format, m.format ? rows_of(m) : Rows{m.data, m.row_bytes, 0, 0}, m.n_in};
    auto* work = panel_scratch.buffer<std::uint8_t>(unit.work_bytes(m.n_in, p.n_rows));
    unit.multiply(weights, task.share.begin, task.share.end, bf16_of(task.input), p.n_rows, work,
                  p.y + task.share.begin, p.to_next());
}

std::size_t span_row_bytes(const Multiplication& p, std::size_t) {
    return div_up(p.matrix->n_in, span_weights) * sizeof(Span);
}
std::size_t packed_vector_bytes(const Multiplication& p, std::size_t lanes) { return PackedSizes(p, 1, lanes).bytes(); }
std::size_t float_row_bytes(const Multiplication& p, std::size_t) { return p.matrix->n_in * sizeof(float); }
std::size_t float_vector_bytes(const Multiplication& p, std::size_t lanes) {
    return lanes * p.matrix->n_in * sizeof(float);
}
std::size_t bf16_row_bytes(const Multiplication& p, std::size_t) { return p.matrix->n_in * sizeof(std::uint16_t); }
std::size_t bf16_tile_bytes(const Multiplication& p, std::size_t) {
    return tile_of(p.matrix->n_in) * sizeof(std::uint16_t);
}

const LayoutTraits& traits_of(ActivationLayout layout) {
    // In the order of ActivationLayout.
    static constexpr LayoutTraits table[] = {
        {false, span_row_bytes, fill_span_row, multiply_spans},
        {true, packed_vector_bytes, fill_packed_vector, multiply_packed_rows},
        {false, nullptr, nullptr, multiply_in_place},
        {false, float_row_bytes, fill_copied_row, multiply_copied_rows},
        {true, float_vector_bytes, fill_float_vector, multiply_float_lanes},
        {false, bf16_row_bytes, fill_bf16_row, multiply_bf16_rows},
        {true, bf16_tile_bytes, fill_bf16_tile, multiply_bf16_tiles},
    };
    static_assert(std::size(table) == std::size_t(ActivationLayout::bf16_tiles) + 1);
    return table[std::size_t(layout)];
}

}  // namespace

Rows rows_of(const Matrix& m) {
    const std::size_t n_spans = m.n_in / span_weights, per_span = span_weights / std::size_t(m.format->block);
    return {m.data, m.row_bytes, n_spans, m.row_bytes - n_spans * per_span * m.format->block_bytes};
}

constexpr std::align_val_t cache_line{64};

Scratch::~Scratch() { ::operator delete(memory_, cache_line); }

void* Scratch::bytes(std::size_t n) {
    if (n > size_) {
        ::operator delete(std::exchange(memory_, nullptr), cache_line);
        size_ = 0;
        memory_ = ::operator new((n + 63) / 64 * 64, cache_line);
        size_ = n;
    }
    return memory_;
}

void multiply_all(const IsaKernels& kernels, Pool& pool, std::span<const Multiplication> products) {
    const Inputs inputs(kernels, pool, products);
    const std::vector<Share> shares = shares_of(kernels, pool, products);
    const auto weights_of = [&](std::size_t i) {
        if (i >= shares.size()) return NextWeights{nullptr, 0};
        const Matrix& m = *products[shares[i].product].matrix;
        return NextWeights{m.data + shares[i].begin * m.row_bytes, (shares[i].end - shares[i].begin) * m.row_bytes};
    };
    pool.run(shares.size(), [&](std::size_t i) {
        const Share& share = shares[i];
        const Input& input = inputs.of(share.product);
        const NextWeights next = weights_of(i + std::size_t(pool.n_threads()));  // roughly this thread's next share
        traits_of(input.layout).multiply({kernels, products[share.product], input, share, next});
    });
}

void multiply_per_head(const IsaKernels& kernels, Pool& pool, const HeadRows& x, std::size_t n_tokens,
                       std::span<const Matrix* const> matrices, float* y, std::size_t y_stride) {
    const std::size_t n = matrices.size();
    std::vector<Multiplication> products;
    products.reserve(n);
    for (std::size_t i = 0; i < n; ++i)
        products.push_back(
            {matrices[i], x.at + i * x.stride, n_tokens, y + i * y_stride, nullptr, n * x.stride, n * y_stride});
    multiply_all(kernels, pool, products);
}

}  // namespace slm
