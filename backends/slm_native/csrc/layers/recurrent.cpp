#include "layers/recurrent.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

namespace slm {

namespace {

constexpr std::size_t state_floats = 4096;    // states of the heads of one task: they fit in the L1 cache
constexpr std::size_t task_values = 1 << 13;  // of an elementwise step; for fewer, waking a thread costs more

// work_scratch belongs to each computing thread, the others to the calling thread.
thread_local Scratch block_scratch, flow_scratch, work_scratch;

std::size_t div_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

// Hands out arrays from one buffer.
class Arena {
public:
    explicit Arena(float* memory) : memory_(memory) {}
    float* operator()(std::size_t n) {
        float* taken = memory_;
        memory_ += in_vectors(n);
        return taken;
    }

private:
    float* memory_;
};

void multiply(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_rows, const Matrix& matrix,
              float* y) {
    const Product product{&matrix, y};
    multiply(kernels, pool, x, n_rows, {&product, 1});
}

void apply_curve(const IsaKernels& kernels, Pool& pool, Curve curve, float* x, std::size_t n) {
    pool.run(div_up(n, task_values), [&](std::size_t i) {
        kernels.scan->curve(curve, x + i * task_values, std::min(task_values, n - i * task_values));
    });
}

// Token-shifted rows: x + (previous - x) * share.
class ShiftedRows final : public RowSource {
public:
    ShiftedRows(const IsaKernels& kernels, const Shift& shift) : kernels_(kernels), shift_(shift) {}
    void make(std::size_t i, float* to) const override { kernels_.scan->shift(shift_, i, to); }

private:
    const IsaKernels& kernels_;
    Shift shift_;
};

void normalize(const IsaKernels& kernels, const Norm& norm, float* row) {
    if (norm.weight) kernels.normalize(norm, row, 1, row);
}

}  // namespace

void selective_scan(const IsaKernels& kernels, Pool& pool, const Scan& scan) {
    std::size_t step = std::max<std::size_t>(1, state_floats / std::max<std::size_t>(1, scan.width * scan.n_state));
    if (step > most_lanes) step -= step % most_lanes;  // whole vectors of heads
    const std::size_t n_blocks = div_up(scan.n_heads, step);
    pool.run(scan.n_sequences * n_blocks, [&](std::size_t i) {
        const std::size_t begin = i % n_blocks * step;
        kernels.scan->heads(scan, i / n_blocks, begin, std::min(scan.n_heads, begin + step),
                            work_scratch.buffer<float>(scan_floats(scan, step)));
    });
}

void convolve(const IsaKernels& kernels, Pool& pool, const Convolution& c) {
    const std::size_t step = in_vectors(std::max<std::size_t>(1, task_values / (c.n_tokens + c.n_taps))),
                      n_blocks = div_up(c.width, step);
    pool.run(c.n_sequences * n_blocks, [&](std::size_t i) {
        const std::size_t begin = i % n_blocks * step;
        kernels.scan->convolve(c, i / n_blocks, begin, std::min(c.width, begin + step),
                               work_scratch.buffer<TappedRow>(c.n_taps));
    });
}

void mamba(const IsaKernels& kernels, Pool& pool, const Mamba& layer, Sequences batch, const float* projected,
           const MambaStates& states, float* y) {
    const std::size_t n = batch.n_rows(), inner = layer.n_inner, rank = layer.n_rank, n_state = layer.n_state;
    const std::size_t n_selected = rank + 2 * n_state;
    Arena take(
        flow_scratch.buffer<float>(in_vectors(n * inner) * 2 + in_vectors(n * n_selected) + in_vectors(n * rank)));
    float *x = take(n * inner), *steps = take(n * inner), *selected = take(n * n_selected), *ranks = take(n * rank);
    convolve(kernels, pool,
             {batch.n_sequences,
              batch.n_tokens,
              inner,
              layer.n_taps,
              {projected, 2 * inner},
              {},
              {},
              layer.taps,
              layer.conv_bias,
              states.window,
              true,
              states.window_after,
              x});
    multiply(kernels, pool, x, n, *layer.select, selected);
    for (std::size_t t = 0; t < n; ++t) {
        float* row = selected + t * n_selected;
        normalize(kernels, layer.norms[0], row);
        normalize(kernels, layer.norms[1], row + rank);
        normalize(kernels, layer.norms[2], row + rank + n_state);
        std::memcpy(ranks + t * rank, row, rank * sizeof(float));
    }
    multiply(kernels, pool, ranks, n, *layer.steps, steps);
    Scan scan{};
    scan.n_sequences = batch.n_sequences, scan.n_tokens = batch.n_tokens, scan.n_heads = inner, scan.width = 1;
    scan.n_groups = 1, scan.n_state = scan.n_rates = n_state;
    scan.x = {x, inner}, scan.steps = {steps, inner}, scan.z = {projected + inner, 2 * inner};
    scan.b = {selected + rank, n_selected}, scan.c = {selected + rank + n_state, n_selected};
    scan.step_bias = layer.step_bias, scan.a = layer.a, scan.d = layer.d;
    scan.before = states.state, scan.after = states.state_after, scan.y = y;
    selective_scan(kernels, pool, scan);
}

void mamba2(const IsaKernels& kernels, Pool& pool, const Mamba2& layer, Sequences batch, const float* projected,
            const MambaStates& states, float* y) {
    const std::size_t n = batch.n_rows(), inner = layer.n_inner, n_selected = layer.n_groups * layer.n_state;
    const std::size_t convolved = inner + 2 * n_selected, entered = inner + convolved + layer.n_heads;
    float* x = flow_scratch.buffer<float>(n * convolved);
    convolve(kernels, pool,
             {batch.n_sequences,
              batch.n_tokens,
              convolved,
              layer.n_taps,
              {projected + inner, entered},
              {},
              {},
              layer.taps,
              layer.conv_bias,
              states.window,
              true,
              states.window_after,
              x});
    Scan scan{};
    scan.n_sequences = batch.n_sequences, scan.n_tokens = batch.n_tokens, scan.n_heads = layer.n_heads;
    scan.width = inner / layer.n_heads, scan.n_groups = layer.n_groups, scan.n_state = layer.n_state, scan.n_rates = 1;
    scan.x = {x, convolved}, scan.b = {x + inner, convolved}, scan.c = {x + inner + n_selected, convolved};
    scan.steps = {projected + inner + convolved, entered}, scan.z = {projected, entered};
    scan.step_bias = layer.step_bias, scan.a = layer.a, scan.d = layer.d;
    scan.before = states.state, scan.after = states.state_after, scan.y = y;
    selective_scan(kernels, pool, scan);
    if (layer.norm.weight) slm::normalize(kernels, pool, y, n * inner, layer.norm, y);
}

void gated_convolution(const IsaKernels& kernels, Pool& pool, const float* taps, std::size_t n_taps, std::size_t width,
                       Sequences batch, const float* projected, const MambaStates& states, float* y) {
    Convolution c{};
    c.n_sequences = batch.n_sequences, c.n_tokens = batch.n_tokens, c.width = width, c.n_taps = n_taps, c.taps = taps;
    c.x_gate = {projected, 3 * width}, c.y_gate = {projected + width, 3 * width},
    c.x = {projected + 2 * width, 3 * width};
    c.before = states.window, c.after = states.window_after, c.y = y;
    convolve(kernels, pool, c);
}

void run_layer(const IsaKernels& kernels, Pool& pool, const RecurrentLayer& layer, Sequences batch,
               const MambaStates& states, float scale, const float* x, const float* residual, float* y) {
    const std::size_t n = batch.n_rows(), inner = layer.output.matrix->n_in;
    Arena take(block_scratch.buffer<float>(in_vectors(n * layer.project.matrix->n_out) + in_vectors(n * inner)));
    float *projected = take(n * layer.project.matrix->n_out), *output = take(n * inner);
    const Projection entered{&layer.project, projected};
    project(kernels, pool, x, n, layer.norm, {&entered, 1});
    if (layer.mamba) mamba(kernels, pool, *layer.mamba, batch, projected, states, output);
    else if (layer.mamba2) mamba2(kernels, pool, *layer.mamba2, batch, projected, states, output);
    else gated_convolution(kernels, pool, layer.taps, layer.n_taps, inner, batch, projected, states, output);
    if (scale == 1.0f) return add_product(kernels, pool, output, n, layer.output, residual, y);
    add_normed(kernels, pool, output, n, layer.output, {}, scale, residual, y);
}

namespace {

// Collects products, and low-rank products in two steps.
class LowRankProducts {
public:
    LowRankProducts(std::size_t n_rows, Arena& take) : n_(n_rows), take_(take) {}

    void add(const Matrix& matrix, const RowSource& x, float* y) {
        first_.push_back({&matrix, nullptr, n_, y}), first_.back().source = &x;
    }

    // Returns the intermediate rows; `y` becomes the output.
    float* add(const LowRank& matrices, const RowSource& x, const float*& y) {
        float *between = take_(n_ * matrices.down->n_out), *to = take_(n_ * matrices.up->n_out);
        add(*matrices.down, x, between);
        second_.push_back({matrices.up, between, n_, to});
        y = to;
        return between;
    }

    std::span<const Multiplication> first() const { return first_; }
    std::span<const Multiplication> second() const { return second_; }

private:
    std::size_t n_;
    Arena& take_;
    std::vector<Multiplication> first_, second_;
};

// Number of floats for the rows of a layer.
std::size_t floats_of_rows(const TimeMix& layer, std::size_t n_rows, std::size_t width) {
    std::size_t n = 2 * in_vectors(n_rows * width);
    for (const LowRank* pair : {&layer.decay, &layer.rate, &layer.gate, &layer.first_value})
        if (pair->down) n += in_vectors(n_rows * pair->down->n_out) + in_vectors(n_rows * width);
    return n;
}

}  // namespace

void time_mix(const IsaKernels& kernels, Pool& pool, const TimeMix& layer, Sequences batch, const float* x,
              const float* last, float* value) {
    DeltaRule rule = layer.rule;
    const std::size_t n = batch.n_rows(), width = rule.n_heads * rule.width, size = n * width;
    Arena take(flow_scratch.buffer<float>(floats_of_rows(layer, n, width)));
    float *r = take(size), *k = take(size);
    const auto shifted = [&](std::size_t share) {
        return ShiftedRows(kernels, {batch.n_tokens, width, x, last, layer.shares + share * width});
    };
    const ShiftedRows shifted_r = shifted(0), shifted_decay = shifted(1), shifted_k = shifted(2),
                      shifted_v = shifted(3), shifted_rate = shifted(4), shifted_gate = shifted(5);
    LowRankProducts pairs(n, take);
    pairs.add(*layer.receptance, shifted_r, r), pairs.add(*layer.key, shifted_k, k),
        pairs.add(*layer.value, shifted_v, value);
    if (layer.first_value.down) pairs.add(layer.first_value, shifted_v, rule.value_share);
    float* decay = pairs.add(layer.decay, shifted_decay, rule.decay);
    pairs.add(layer.rate, shifted_rate, rule.rate);
    float* gate = pairs.add(layer.gate, shifted_gate, rule.gate);
    multiply_all(kernels, pool, pairs.first());
    apply_curve(kernels, pool, Curve::tanh, decay, n * layer.decay.down->n_out);
    apply_curve(kernels, pool, Curve::sigmoid, gate, n * layer.gate.down->n_out);
    multiply_all(kernels, pool, pairs.second());
    rule.r = r, rule.k = k, rule.v = value;
    pool.run(rule.n_sequences * rule.n_heads, [&](std::size_t i) {
        kernels.scan->delta(rule, i / rule.n_heads, i % rule.n_heads, work_scratch.buffer<float>(delta_floats(rule)));
    });
}

void channel_mix(const IsaKernels& kernels, Pool& pool, const ChannelMix& layer, Sequences batch, const float* x,
                 const float* last, const float* residual, float* y) {
    const std::size_t n = batch.n_rows(), width = layer.up->n_in, inner = layer.up->n_out;
    float* between = flow_scratch.buffer<float>(n * inner);
    const ShiftedRows shifted(kernels, {batch.n_tokens, width, x, last, layer.share});
    Multiplication up{layer.up, nullptr, n, between};
    up.source = &shifted;
    multiply_all(kernels, pool, {&up, 1});
    apply_curve(kernels, pool, Curve::relu_squared, between, n * inner);
    if (residual) return add_product(kernels, pool, between, n, {layer.down, nullptr}, residual, y);
    multiply(kernels, pool, between, n, *layer.down, y);
}

namespace {

// The last token of each sequence, [B][width] of rows [B * T][width].
void keep_last(Sequences batch, std::size_t width, const float* rows, float* last) {
    for (std::size_t i = 0; i < batch.n_sequences; ++i)
        std::memcpy(last + i * width, rows + ((i + 1) * batch.n_tokens - 1) * width, width * sizeof(float));
}

}  // namespace

void rwkv_block(const IsaKernels& kernels, Pool& pool, const RwkvBlock& block, Sequences batch,
                const RwkvStates& states, float* values, float* x) {
    const std::size_t n = batch.n_rows(), width = block.channel.up->n_in;
    Arena take(block_scratch.buffer<float>(4 * in_vectors(n * width)));
    float *rows = take(n * width), *mixed = take(n * width), *after = take(n * width), *block_values = take(n * width);
    TimeMix time = block.time;
    DeltaRule& rule = time.rule;
    rule.n_sequences = batch.n_sequences, rule.n_tokens = batch.n_tokens;
    rule.before = states.state, rule.after = states.state_after, rule.y = mixed;
    const bool is_first = !time.first_value.down;
    rule.first_value = is_first ? nullptr : values;
    normalize(kernels, pool, x, n * width, block.time_norm, rows);
    time_mix(kernels, pool, time, batch, rows, states.last, is_first ? values : block_values);
    keep_last(batch, width, rows, states.last_after);
    add_product(kernels, pool, mixed, n, block.output, x, after);
    normalize(kernels, pool, after, n * width, block.channel_norm, rows);
    keep_last(batch, width, rows, states.channel_last_after);
    channel_mix(kernels, pool, block.channel, batch, rows, states.channel_last, after, x);
}

}  // namespace slm
