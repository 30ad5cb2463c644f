// Python bindings of recurrent layers: they only check arguments.
#include "bindings/module_recurrent.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bindings/rwkv_handle.h"
#include "bindings/recurrent_handle.h"

namespace slm::python {

namespace {

using namespace nb::literals;

// The values of a float32 array of this shape.
const float* shaped(const Array& array, const char* name, std::initializer_list<std::size_t> shape) {
    const float* values = elements<float>(array, name, "float32", shape.size());
    std::size_t i = 0;
    for (std::size_t n : shape) require(array.shape(i++) == n, name, " does not fit the others; its shape is ", array);
    return values;
}

const float* shaped(const MaybeArray& array, const char* name, std::initializer_list<std::size_t> shape) {
    return array ? shaped(*array, name, shape) : nullptr;
}

// Input rows of B sequences of T tokens each.
struct InputRows {
    const float* rows;
    Sequences batch;
    std::size_t width;
};

InputRows input_rows(const Array& x, const char* name) {
    const float* rows = elements<float>(x, name, "float32", 3);
    require(x.size() != 0, name, " has no numbers");
    return {rows, {x.shape(0), x.shape(1)}, x.shape(2)};
}

// The state of an RWKV-7 block: time mixing's last token, its matrix state, channel mixing's last token.
using RwkvState = std::tuple<Array, Array, Array>;

// Buffers for the state after a batch.
struct BuffersAfter {
    BuffersAfter(std::size_t n_last, std::size_t n_state) : last(n_last), state(n_state), channel_last(n_last) {}
    Buffer last, state, channel_last;
};

class RecurrentKernels {
public:
    RecurrentKernels(const std::string& isa, int n_threads) : kernels_(kernels_of(find_isa(isa))) {
        require(n_threads >= 1, "n_threads is ", n_threads);
        pool_ = Pool::shared(n_threads);
    }

    nb::tuple selective_scan(const Array& x, const Array& steps, const Array& a, const Array& b, const Array& c,
                             const Array& state) const {
        Scan scan{};
        scan.x.at = elements<float>(x, "x", "float32", 4);
        scan.n_sequences = x.shape(0), scan.n_tokens = x.shape(1), scan.n_heads = x.shape(2), scan.width = x.shape(3);
        scan.a = elements<float>(a, "a", "float32", 2);
        scan.before = elements<float>(state, "state", "float32", 4);
        scan.n_groups = b.ndim() == 4 ? b.shape(2) : 0, scan.n_state = state.shape(3), scan.n_rates = a.shape(1);
        require(scan.n_heads != 0 && scan.n_groups != 0 && scan.n_heads % scan.n_groups == 0,
                "the heads of x must be a multiple of the groups of b, at least one");
        require(a.shape(0) == scan.n_heads && (scan.n_rates == 1 || scan.n_rates == scan.n_state),
                "a must have a rate, or one for each number of the state, for each head; its shape is ", a);
        scan.steps.at = shaped(steps, "steps", {scan.n_sequences, scan.n_tokens, scan.n_heads});
        scan.b.at = shaped(b, "b", {scan.n_sequences, scan.n_tokens, scan.n_groups, scan.n_state});
        scan.c.at = shaped(c, "c", {scan.n_sequences, scan.n_tokens, scan.n_groups, scan.n_state});
        shaped(state, "state", {scan.n_sequences, scan.n_heads, scan.width, scan.n_state});
        scan.x.stride = scan.n_heads * scan.width, scan.steps.stride = scan.n_heads;
        scan.b.stride = scan.c.stride = scan.n_groups * scan.n_state;
        Buffer y(x.size()), after(state.size());
        scan.y = y.get(), scan.after = after.get();
        {
            nb::gil_scoped_release unlocked;
            slm::selective_scan(kernels_, *pool_, scan);
        }
        return nb::make_tuple(
            owned<StateArray>(std::move(y), {scan.n_sequences, scan.n_tokens, scan.n_heads, scan.width}),
            owned<StateArray>(std::move(after), {scan.n_sequences, scan.n_heads, scan.width, scan.n_state}));
    }

    nb::tuple gated_convolution(const Array& projected, const Array& window, const Array& taps) const {
        const InputRows in = input_rows(projected, "projected");
        const std::size_t width = in.width / 3, n_taps = n_taps_of(taps);
        require(in.width % 3 == 0, "the width of projected must be a multiple of 3");
        const float *values = rows_of(taps, "taps", n_taps, width),
                    *before = shaped(window, "window", {in.batch.n_sequences, n_taps - 1, width});
        Buffer y(in.batch.n_rows() * width), after(window.size());
        {
            nb::gil_scoped_release unlocked;
            slm::gated_convolution(kernels_, *pool_, values, n_taps, width, in.batch, in.rows,
                                   {before, nullptr, after.get(), nullptr}, y.get());
        }
        return nb::make_tuple(owned<HeadArray>(std::move(y), {in.batch.n_sequences, in.batch.n_tokens, width}),
                              owned<HeadArray>(std::move(after), {in.batch.n_sequences, n_taps - 1, width}));
    }

    nb::tuple mamba(const Array& projected, const Array& window, const Array& state, const MambaHandle& layer) const {
        require(layer.is_of(kernels_), other_kernels);
        return run_inner(projected, window, state, layer,
                         [&](const InputRows& in, const MambaStates& states, float* y) {
                             slm::mamba(kernels_, *pool_, layer.layer(), in.batch, in.rows, states, y);
                         });
    }

    nb::tuple mamba2(const Array& projected, const Array& window, const Array& state, const Mamba2Handle& layer) const {
        return run_inner(projected, window, state, layer,
                         [&](const InputRows& in, const MambaStates& states, float* y) {
                             slm::mamba2(kernels_, *pool_, layer.layer(), in.batch, in.rows, states, y);
                         });
    }

    nb::tuple run_layer(const Array& x, const Array& residual, const RecurrentLayerHandle& layer,
                        std::size_t n_sequences, float scale, const std::vector<Array>& before) const {
        require(layer.is_of(kernels_), other_kernels);
        const float* rows = elements<float>(x, "x", "float32", 2);
        const std::size_t n_rows = x.shape(0);
        require(x.shape(1) == layer.width(), "x does not fit the layer");
        require(n_sequences != 0 && n_rows != 0 && n_rows % n_sequences == 0,
                "the rows of x must be a multiple of the number of sequences");
        const float* residual_rows = rows_of(residual, "residual", n_rows, layer.width());
        require(before.size() == (layer.has_state() ? 2 : 1), "a window or a state is missing, or too many");
        const StateShape& shape = layer.state_shape();
        const float* window = shaped(before[0], "window", {n_sequences, shape.n_taps - 1, shape.n_convolved});
        const float* state = layer.has_state()
                                 ? shaped(before[1], "state", {n_sequences, shape.heads, shape.width, shape.n_state})
                                 : nullptr;
        Buffer y(x.size()), window_after(before[0].size()), state_after(state ? before[1].size() : 0);
        {
            nb::gil_scoped_release unlocked;
            const Sequences batch{n_sequences, n_rows / n_sequences};
            slm::run_layer(kernels_, *pool_, layer.layer(), batch,
                           {window, state, window_after.get(), state_after.get()}, scale, rows, residual_rows, y.get());
        }
        nb::list after;
        after.append(owned<HeadArray>(std::move(window_after), {n_sequences, shape.n_taps - 1, shape.n_convolved}));
        if (state)
            after.append(
                owned<StateArray>(std::move(state_after), {n_sequences, shape.heads, shape.width, shape.n_state}));
        return nb::make_tuple(owned<FloatMatrix>(std::move(y), {n_rows, layer.width()}), nb::tuple(after));
    }

    nb::tuple time_mix(const Array& x, const Array& last, const Array& state, const MaybeArray& first_value,
                       const TimeMixHandle& mix) const {
        const InputRows in = input_rows(x, "x");
        const std::size_t width = mix.width(), n_rows = in.batch.n_rows();
        require(mix.is_of(kernels_), other_kernels);
        require(in.width == width, "x does not fit the matrices");
        require(first_value.has_value() != mix.is_first(), "values of the first layer are missing, or too many");
        TimeMix layer = mix.layer();
        DeltaRule& rule = layer.rule;
        rule.n_sequences = in.batch.n_sequences, rule.n_tokens = in.batch.n_tokens;
        rule.before = shaped(state, "state", {rule.n_sequences, rule.n_heads, rule.width, rule.width});
        rule.first_value = shaped(first_value, "first_value", {n_rows, width});
        const float* before = shaped(last, "last", {rule.n_sequences, 1, width});
        Buffer y(x.size()), value(x.size()), after(state.size());
        rule.y = y.get(), rule.after = after.get();
        {
            nb::gil_scoped_release unlocked;
            slm::time_mix(kernels_, *pool_, layer, in.batch, in.rows, before, value.get());
        }
        return nb::make_tuple(
            owned<HeadArray>(std::move(y), {rule.n_sequences, rule.n_tokens, width}),
            owned<FloatMatrix>(std::move(value), {n_rows, width}),
            owned<StateArray>(std::move(after), {rule.n_sequences, rule.n_heads, rule.width, rule.width}));
    }

    HeadArray channel_mix(const Array& x, const Array& last, const ChannelMixHandle& mix) const {
        const InputRows in = input_rows(x, "x");
        require(mix.is_of(kernels_), other_kernels);
        require(in.width == mix.width(), "x does not fit the matrices");
        const float* before = shaped(last, "last", {in.batch.n_sequences, 1, in.width});
        Buffer y(x.size());
        {
            nb::gil_scoped_release unlocked;
            slm::channel_mix(kernels_, *pool_, mix.layer(), in.batch, in.rows, before, nullptr, y.get());
        }
        return owned<HeadArray>(std::move(y), {in.batch.n_sequences, in.batch.n_tokens, in.width});
    }

    nb::tuple rwkv_blocks(const Array& x, const std::vector<const RwkvBlockHandle*>& blocks,
                          const std::vector<RwkvState>& before, const MaybeArray& first_value) const {
        const InputRows in = input_rows(x, "x");
        require(!blocks.empty() && blocks.size() == before.size(),
                "there must be at least one block, and one state per block");
        require(first_value.has_value() != blocks[0]->is_first(), "values of the first layer are missing, or too many");
        std::vector<RwkvStates> states;
        std::vector<BuffersAfter> after;
        for (std::size_t i = 0; i < blocks.size(); ++i) {
            require(!i || !blocks[i]->is_first(), "a first block after another block");
            const auto& [last, state, channel_last] = before[i];
            states.push_back(checked(*blocks[i], in, last, state, channel_last));
            after.emplace_back(last.size(), state.size());
            states.back().last_after = after.back().last.get(), states.back().state_after = after.back().state.get();
            states.back().channel_last_after = after.back().channel_last.get();
        }
        const float* first_values = shaped(first_value, "first_value", {in.batch.n_rows(), in.width});
        Buffer y(x.size()), values(x.size());
        {
            nb::gil_scoped_release unlocked;
            std::memcpy(y.get(), in.rows, x.size() * sizeof(float));
            if (first_values) std::memcpy(values.get(), first_values, x.size() * sizeof(float));
            for (std::size_t i = 0; i < blocks.size(); ++i)
                slm::rwkv_block(kernels_, *pool_, blocks[i]->block(), in.batch, states[i], values.get(), y.get());
        }
        nb::list states_after;
        for (std::size_t i = 0; i < blocks.size(); ++i) {
            const DeltaRule& rule = blocks[i]->time().rule;
            const std::size_t n = in.batch.n_sequences, heads = rule.n_heads, width = rule.width;
            states_after.append(nb::make_tuple(owned<HeadArray>(std::move(after[i].last), {n, 1, in.width}),
                                               owned<StateArray>(std::move(after[i].state), {n, heads, width, width}),
                                               owned<HeadArray>(std::move(after[i].channel_last), {n, 1, in.width})));
        }
        return nb::make_tuple(owned<HeadArray>(std::move(y), {in.batch.n_sequences, in.batch.n_tokens, in.width}),
                              owned<FloatMatrix>(std::move(values), {in.batch.n_rows(), in.width}), states_after);
    }

private:
    // The state of a block before the batch.
    RwkvStates checked(const RwkvBlockHandle& block, const InputRows& in, const Array& last, const Array& state,
                       const Array& channel_last) const {
        require(block.is_of(kernels_), other_kernels);
        require(in.width == block.width(), "x does not fit the matrices");
        const DeltaRule& rule = block.time().rule;
        const std::size_t n = in.batch.n_sequences;
        return {shaped(last, "last", {n, 1, in.width}),
                shaped(state, "state", {n, rule.n_heads, rule.width, rule.width}),
                shaped(channel_last, "channel_last", {n, 1, in.width}),
                nullptr,
                nullptr,
                nullptr};
    }

    // Runs `compute`, the part of a layer between its projections. Returns y, and the window and state after the batch.
    template <class Layer, class Compute>
    static nb::tuple run_inner(const Array& projected, const Array& window, const Array& state, const Layer& layer,
                               const Compute& compute) {
        const InputRows in = input_rows(projected, "projected");
        const StateShape shape = layer.state_shape();
        const std::size_t n = in.batch.n_sequences;
        require(in.width == layer.n_projected(), "projected does not fit the layer");
        const float* window_before = shaped(window, "window", {n, shape.n_taps - 1, shape.n_convolved});
        const float* before = shaped(state, "state", {n, shape.heads, shape.width, shape.n_state});
        Buffer y(in.batch.n_rows() * layer.n_inner()), window_after(window.size()), after(state.size());
        {
            nb::gil_scoped_release unlocked;
            compute(in, {window_before, before, window_after.get(), after.get()}, y.get());
        }
        return nb::make_tuple(owned<HeadArray>(std::move(y), {n, in.batch.n_tokens, layer.n_inner()}),
                              owned<HeadArray>(std::move(window_after), {n, shape.n_taps - 1, shape.n_convolved}),
                              owned<StateArray>(std::move(after), {n, shape.heads, shape.width, shape.n_state}));
    }

    const IsaKernels& kernels_;
    std::shared_ptr<Pool> pool_;
};

void bind_layers(nb::module_& module) {
    nb::class_<MambaHandle>(
        module, "Mamba",
        "The weights of Mamba between its input and output matrices. They keep their arrays alive.\n\n"
        "Shapes: W taps, D channels, N state values per channel, R rank of the step sizes.\n\n"
        "Args:\n"
        "    taps: [W, D].\n"
        "    conv_bias: [D], or None.\n"
        "    select: (R + 2N, D).\n"
        "    step_norm: weights of the norm of step sizes [R], or None.\n"
        "    b_norm: weights of the norm of b [N], or None.\n"
        "    c_norm: weights of the norm of c [N], or None.\n"
        "    epsilons: of the three norms.\n"
        "    steps: (D, R).\n"
        "    step_bias: [D], or None.\n"
        "    a: [D, N].\n"
        "    d: [D].\n\n"
        "Raises:\n"
        "    TypeError: a wrong dtype, or not a CPU array.\n"
        "    ValueError: shapes that do not fit each other.")
        .def(nb::init<const Array&, const MaybeArray&, const Weights&, const MaybeArray&, const MaybeArray&,
                      const MaybeArray&, const std::vector<float>&, const Weights&, const MaybeArray&, const Array&,
                      const Array&>(),
             "taps"_a, "conv_bias"_a.none(), "select"_a, "step_norm"_a.none(), "b_norm"_a.none(), "c_norm"_a.none(),
             "epsilons"_a, "steps"_a, "step_bias"_a.none(), "a"_a, "d"_a);
    nb::class_<Mamba2Handle>(
        module, "Mamba2",
        "The weights of Mamba 2 between its input and output matrices. Errors: see Mamba.\n\n"
        "Shapes: W taps, D channels, H heads, G groups, N state values per channel, C = D + 2GN.\n\n"
        "Args:\n"
        "    taps: [W, C].\n"
        "    conv_bias: [C], or None.\n"
        "    step_bias: [H].\n"
        "    a: [H, 1].\n"
        "    d: [H, 1].\n"
        "    norm: [G, D / G], or None.\n"
        "    eps: of the norm.\n"
        "    n_groups: G.\n"
        "    n_state: N.")
        .def(nb::init<const Array&, const MaybeArray&, const Array&, const Array&, const Array&, const MaybeArray&,
                      float, std::size_t, std::size_t>(),
             "taps"_a, "conv_bias"_a.none(), "step_bias"_a, "a"_a, "d"_a, "norm"_a.none(), "eps"_a, "n_groups"_a,
             "n_state"_a);
    nb::class_<RecurrentLayerHandle>(
        module, "StateLayer",
        "A recurrent layer from its norm, if any, to its output matrix.\n\n"
        "`between` is the part between the input and output matrices: Mamba, Mamba2, or the taps [W, E] of a gated\n"
        "convolution. Errors: see Mamba.")
        .def(nb::init<const MaybeNorm&, const LinearHandle&, const MambaHandle&, const LinearHandle&>(),
             nb::keep_alive<1, 4>(), "norm"_a.none(), "project"_a, "between"_a, "output"_a)
        .def(nb::init<const MaybeNorm&, const LinearHandle&, const Mamba2Handle&, const LinearHandle&>(),
             nb::keep_alive<1, 4>(), "norm"_a.none(), "project"_a, "between"_a, "output"_a)
        .def(nb::init<const MaybeNorm&, const LinearHandle&, const Array&, const LinearHandle&>(), "norm"_a.none(),
             "project"_a, "between"_a, "output"_a);
}

void bind_rwkv(nb::module_& module) {
    nb::class_<TimeMixHandle>(
        module, "TimeMix",
        "The weights of RWKV-7's time mixing; see slm_native/kernels/rwkv.py. They keep their arrays alive.\n\n"
        "Args:\n"
        "    shares: [6, E], the share of the previous token in receptance, decay, key, value, rate and gate.\n"
        "    matrices: receptance, key, value; then down and up of decay, rate, gate and, except in the model's first\n"
        "        layer, first_value.\n"
        "    rows: [E] each: the biases of decay and rate, key_removed, key_rate, bonus, weight and bias of the head\n"
        "        norm and, except in the model's first layer, the bias of first_value.\n"
        "    unit: [P], the weight of the norm of removal keys.\n"
        "    unit_eps: epsilon of this norm.\n"
        "    norm_eps: epsilon of the head norm.\n"
        "    slowest: factor on the sigmoid that gives the logarithm of a decay.\n\n"
        "Raises:\n"
        "    TypeError: a wrong dtype, or not a CPU array.\n"
        "    ValueError: shapes that do not fit each other.")
        .def(nb::init<const Array&, std::vector<Weights>, std::vector<Array>, const Array&, float, float, float>(),
             "shares"_a, "matrices"_a, "rows"_a, "unit"_a, "unit_eps"_a, "norm_eps"_a, "slowest"_a);
    nb::class_<ChannelMixHandle>(
        module, "ChannelMix",
        "The weights of RWKV-7's channel mixing: share [E], up (F, E) and down (E, F). Errors: see TimeMix.")
        .def(nb::init<const Array&, const Weights&, const Weights&>(), "share"_a, "up"_a, "down"_a);
    nb::class_<RwkvBlockHandle>(
        module, "RwkvBlock",
        "A block of RWKV-7: time mixing and channel mixing, each after its norm. Errors: see TimeMix.")
        .def(nb::init<const NormHandle&, const TimeMixHandle&, const LinearHandle&, const NormHandle&,
                      const ChannelMixHandle&>(),
             nb::keep_alive<1, 3>(), nb::keep_alive<1, 6>(), "time_norm"_a, "time"_a, "output"_a, "channel_norm"_a,
             "channel"_a);
}

void bind_kernels(nb::module_& module) {
    nb::class_<RecurrentKernels>(
        module, "StateKernels",
        "Recurrent layers, on the kernels of one instruction set and a thread pool; see Kernels.\n\n"
        "All arrays are aligned, C-contiguous float32 in CPU memory. They have B sequences of T tokens each, both at\n"
        "least 1. Methods release the GIL while they compute, and do not change their arguments. They raise TypeError\n"
        "for a wrong dtype or an array on another device, and ValueError for a wrong shape or for weights of another\n"
        "instruction set. States that are returned are the states after the last token.")
        .def(nb::init<const std::string&, int>(), "isa"_a, "n_threads"_a)
        .def(
            "selective_scan", &RecurrentKernels::selective_scan, "x"_a, "steps"_a, "a"_a, "b"_a, "c"_a, "state"_a,
            "The scan of a selective state space; see RecurrentOps.selective_scan in slm_native/kernels/recurrent.py.\n\n"
            "Args:\n"
            "    x: [B, T, H, P].\n"
            "    steps: step sizes before the softplus [B, T, H].\n"
            "    a: [H, 1] or [H, N].\n"
            "    b: [B, T, G, N]; H is a multiple of G.\n"
            "    c: [B, T, G, N].\n"
            "    state: state before the first token [B, H, P, N].\n\n"
            "Returns:\n"
            "    y [B, T, H, P], and the state.")
        .def("gated_convolution", &RecurrentKernels::gated_convolution, "projected"_a, "window"_a, "taps"_a,
             "c * convolution(b * x), a gated short convolution between its input and output matrices.\n\n"
             "Args:\n"
             "    projected: b, c and x side by side, [B, T, 3E].\n"
             "    window: values of b * x before the first token [B, W - 1, E].\n"
             "    taps: [W, E].\n\n"
             "Returns:\n"
             "    y [B, T, E], and the window.")
        .def("mamba", &RecurrentKernels::mamba, "projected"_a, "window"_a, "state"_a, "layer"_a,
             "Mamba between its input and output matrices.\n\n"
             "Args:\n"
             "    projected: the convolution's input and the gate, side by side, [B, T, 2D].\n"
             "    window: the convolution's inputs before the first token [B, W - 1, D].\n"
             "    state: state before the first token [B, D, 1, N].\n"
             "    layer: the weights.\n\n"
             "Returns:\n"
             "    y [B, T, D], the window and the state.")
        .def("mamba2", &RecurrentKernels::mamba2, "projected"_a, "window"_a, "state"_a, "layer"_a,
             "Mamba 2 between its input and output matrices.\n\n"
             "Args:\n"
             "    projected: the gate, the convolution's input and the step sizes, side by side, [B, T, D + C + H].\n"
             "    window: the convolution's inputs before the first token [B, W - 1, C].\n"
             "    state: state before the first token [B, H, D / H, N].\n"
             "    layer: the weights.\n\n"
             "Returns:\n"
             "    y [B, T, D], the window and the state.")
        .def("run_layer", &RecurrentKernels::run_layer, "x"_a, "residual"_a, "layer"_a, "n_sequences"_a, "scale"_a,
             "before"_a,
             "residual + scale * layer(x).\n\n"
             "Args:\n"
             "    x: [B * T, E], one sequence after another.\n"
             "    residual: [B * T, E].\n"
             "    layer: the weights.\n"
             "    n_sequences: B.\n"
             "    scale: factor on the output of the layer.\n"
             "    before: the window before the first token and, except for a gated convolution, the state.\n\n"
             "Returns:\n"
             "    y [B * T, E], and the window and the state like `before`.")
        .def("time_mix", &RecurrentKernels::time_mix, "x"_a, "last"_a, "state"_a, "first_value"_a.none(), "mix"_a,
             "RWKV-7's time mixing up to its output matrix; see RwkvOps.time_mix in slm_native/kernels/rwkv.py.\n\n"
             "Args:\n"
             "    x: normalized tokens [B, T, E].\n"
             "    last: the token before them [B, 1, E].\n"
             "    state: state before the first token [B, H, P, P].\n"
             "    first_value: the values [B * T, E] of the model's first layer; None in the first layer.\n"
             "    mix: the weights.\n\n"
             "Returns:\n"
             "    y [B, T, E], the layer's values [B * T, E], and the state.")
        .def("channel_mix", &RecurrentKernels::channel_mix, "x"_a, "last"_a, "mix"_a,
             "RWKV-7's channel mixing of normalized tokens x [B, T, E] after last [B, 1, E]: [B, T, E].")
        .def(
            "rwkv_blocks", &RecurrentKernels::rwkv_blocks, "x"_a, "blocks"_a, "before"_a, "first_value"_a.none(),
            "Runs blocks of RWKV-7 one after another.\n\n"
            "Args:\n"
            "    x: the input of the first block [B, T, E].\n"
            "    blocks: at least one. Only the first of them may be the model's first block.\n"
            "    before: the state of each block before the first token: the last token of time mixing [B, 1, E], the\n"
            "        matrix state [B, H, P, P], and the last token of channel mixing [B, 1, E].\n"
            "    first_value: the values [B * T, E] of the model's first block; None if it is one of `blocks`.\n\n"
            "Returns:\n"
            "    y [B, T, E], the values [B * T, E] of the model's first block, and the states like `before`.");
}

}  // namespace

void bind_recurrent(nb::module_& module) {
    bind_layers(module);
    bind_rwkv(module);
    bind_kernels(module);
}

}  // namespace slm::python
