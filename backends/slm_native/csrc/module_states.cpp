// Python bindings of layers with a state: checks of arguments, and nothing else.
#include "module_states.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "rwkv_handle.h"

namespace slm::python {

namespace {

using namespace nb::literals;

// Numbers of a float32 array of this shape.
const float* shaped(const Array& array, const char* name, std::initializer_list<std::size_t> shape) {
    const float* values = elements<float>(array, name, "float32", shape.size());
    std::size_t i = 0;
    for (std::size_t n : shape)
        if (array.shape(i++) != n)
            throw nb::value_error((std::string(name) + " does not fit the others; its shape is " + shape_of(array)).c_str());
    return values;
}

const float* shaped(const MaybeArray& array, const char* name, std::initializer_list<std::size_t> shape) {
    return array ? shaped(*array, name, shape) : nullptr;
}

// B sequences of T tokens, and the width of their rows.
struct Entered {
    const float* rows;
    Sequences batch;
    std::size_t width;
};

Entered entered(const Array& x, const char* name) {
    const float* rows = elements<float>(x, name, "float32", 3);
    if (x.size() == 0) throw nb::value_error((std::string(name) + " has no numbers").c_str());
    return {rows, {x.shape(0), x.shape(1)}, x.shape(2)};
}

// The taps of a convolution, [W][channels].
std::size_t n_taps_of(const Array& taps, std::size_t width) {
    shaped(taps, "taps", {taps.ndim() == 2 ? taps.shape(0) : 0, width});
    if (taps.shape(0) == 0) throw nb::value_error("no taps");
    return taps.shape(0);
}

constexpr const char* other_kernels = "the weights are another instruction set's";

// What a block of RWKV-7 remembers: the last token that time mixing saw, its state, the last that channel mixing saw.
using Remembered = std::tuple<Array, Array, Array>;

// Likewise after a batch.
struct RoomsAfter {
    RoomsAfter(std::size_t n_last, std::size_t n_state) : last(n_last), state(n_state), channel_last(n_last) {}
    Room last, state, channel_last;
};

class StateKernels {
public:
    StateKernels(const std::string& isa, int n_threads) : kernels_(kernels_of(find_isa(isa))) {
        if (n_threads < 1) throw nb::value_error(("n_threads is " + std::to_string(n_threads)).c_str());
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
        if (scan.n_heads == 0 || scan.n_groups == 0 || scan.n_heads % scan.n_groups)
            throw nb::value_error("the heads of x must be a multiple of the groups of b, at least one");
        if (a.shape(0) != scan.n_heads || (scan.n_rates != 1 && scan.n_rates != scan.n_state))
            throw nb::value_error(("a must have a rate, or one for each number of the state, for each head; its shape is " +
                                   shape_of(a)).c_str());
        scan.steps.at = shaped(steps, "steps", {scan.n_sequences, scan.n_tokens, scan.n_heads});
        scan.b.at = shaped(b, "b", {scan.n_sequences, scan.n_tokens, scan.n_groups, scan.n_state});
        scan.c.at = shaped(c, "c", {scan.n_sequences, scan.n_tokens, scan.n_groups, scan.n_state});
        shaped(state, "state", {scan.n_sequences, scan.n_heads, scan.width, scan.n_state});
        scan.x.stride = scan.n_heads * scan.width, scan.steps.stride = scan.n_heads;
        scan.b.stride = scan.c.stride = scan.n_groups * scan.n_state;
        Room y(x.size()), after(state.size());
        scan.y = y.get(), scan.after = after.get();
        {
            nb::gil_scoped_release unlocked;
            slm::selective_scan(kernels_, *pool_, scan);
        }
        return nb::make_tuple(owned<StateArray>(std::move(y), {scan.n_sequences, scan.n_tokens, scan.n_heads, scan.width}),
                              owned<StateArray>(std::move(after), {scan.n_sequences, scan.n_heads, scan.width, scan.n_state}));
    }

    nb::tuple gated_convolution(const Array& projected, const Array& window, const Array& taps) const {
        const Entered in = entered(projected, "projected");
        const std::size_t width = in.width / 3;
        if (in.width % 3) throw nb::value_error("projected must have rows of three parts of one width");
        Convolution c{};
        c.n_sequences = in.batch.n_sequences, c.n_tokens = in.batch.n_tokens, c.width = width;
        c.n_taps = n_taps_of(taps, width), c.taps = static_cast<const float*>(taps.data());
        c.x_gate = {in.rows, in.width}, c.y_gate = {in.rows + width, in.width}, c.x = {in.rows + 2 * width, in.width};
        c.before = shaped(window, "window", {c.n_sequences, c.n_taps - 1, width});
        Room y(in.batch.n_rows() * width), after(window.size());
        c.y = y.get(), c.after = after.get();
        {
            nb::gil_scoped_release unlocked;
            slm::convolve(kernels_, *pool_, c);
        }
        return nb::make_tuple(owned<HeadArray>(std::move(y), {c.n_sequences, c.n_tokens, width}),
                              owned<HeadArray>(std::move(after), {c.n_sequences, c.n_taps - 1, width}));
    }

    nb::tuple mamba(const Array& projected, const Array& window, const Array& state, const Array& taps, const MaybeArray& conv_bias,
                    const Weights& select, const MaybeArray& step_norm, const MaybeArray& b_norm, const MaybeArray& c_norm,
                    const std::vector<float>& epsilons, const Weights& steps, const MaybeArray& step_bias, const Array& a,
                    const Array& d) const {
        const Entered in = entered(projected, "projected");
        check(select), check(steps);
        Mamba layer{};
        layer.n_inner = steps.matrix.n_out, layer.n_rank = steps.matrix.n_in, layer.n_state = a.ndim() == 2 ? a.shape(1) : 0;
        const std::size_t inner = layer.n_inner, n_state = layer.n_state;
        if (in.width != 2 * inner || select.matrix.n_in != inner || select.matrix.n_out != layer.n_rank + 2 * n_state)
            throw nb::value_error("projected, select and steps do not fit each other");
        if (epsilons.size() != 3) throw nb::value_error("three norms have as many epsilons");
        layer.n_taps = n_taps_of(taps, inner), layer.taps = static_cast<const float*>(taps.data());
        layer.conv_bias = row_of(conv_bias, "conv_bias", inner), layer.step_bias = row_of(step_bias, "step_bias", inner);
        layer.select = &select.matrix, layer.steps = &steps.matrix;
        layer.norms[0] = {row_of(step_norm, "step_norm", layer.n_rank), nullptr, layer.n_rank, 1, epsilons[0], false};
        layer.norms[1] = {row_of(b_norm, "b_norm", n_state), nullptr, n_state, 1, epsilons[1], false};
        layer.norms[2] = {row_of(c_norm, "c_norm", n_state), nullptr, n_state, 1, epsilons[2], false};
        layer.a = shaped(a, "a", {inner, n_state}), layer.d = shaped(d, "d", {inner});
        const float* before = shaped(state, "state", {in.batch.n_sequences, inner, 1, n_state});
        return with_states(in.batch, inner, inner, layer.n_taps, window, state, before, [&](const MambaStates& states, float* y) {
            slm::mamba(kernels_, *pool_, layer, in.batch, in.rows, states, y);
        });
    }

    nb::tuple mamba2(const Array& projected, const Array& window, const Array& state, const Array& taps, const MaybeArray& conv_bias,
                     const Array& step_bias, const Array& a, const Array& d, const MaybeArray& norm, float eps,
                     std::size_t n_groups) const {
        const Entered in = entered(projected, "projected");
        const float* before = elements<float>(state, "state", "float32", 4);
        Mamba2 layer{};
        layer.n_heads = state.shape(1), layer.n_state = state.shape(3), layer.n_groups = n_groups;
        layer.n_inner = layer.n_heads * state.shape(2);
        const std::size_t inner = layer.n_inner, n_heads = layer.n_heads, convolved = inner + 2 * n_groups * layer.n_state;
        if (n_groups == 0 || n_heads == 0 || n_heads % n_groups || state.shape(0) != in.batch.n_sequences)
            throw nb::value_error("the heads of the state must be a multiple of the groups, at least one, and fit the sequences");
        if (in.width != inner + convolved + n_heads) throw nb::value_error("projected does not fit the state");
        layer.n_taps = n_taps_of(taps, convolved), layer.taps = static_cast<const float*>(taps.data());
        layer.conv_bias = row_of(conv_bias, "conv_bias", convolved), layer.step_bias = shaped(step_bias, "step_bias", {n_heads});
        layer.a = shaped(a, "a", {n_heads, 1}), layer.d = shaped(d, "d", {n_heads, 1});
        layer.norm = {shaped(norm, "norm", {n_groups, inner / n_groups}), nullptr, inner / n_groups, n_groups, eps, false};
        return with_states(in.batch, inner, convolved, layer.n_taps, window, state, before, [&](const MambaStates& states, float* y) {
            slm::mamba2(kernels_, *pool_, layer, in.batch, in.rows, states, y);
        });
    }

    nb::tuple time_mix(const Array& x, const Array& last, const Array& state, const MaybeArray& first_value,
                       const TimeMixHandle& mix) const {
        const Entered in = entered(x, "x");
        const std::size_t width = mix.width(), n_rows = in.batch.n_rows();
        if (!mix.is_of(kernels_)) throw nb::value_error(other_kernels);
        if (in.width != width) throw nb::value_error("x does not fit the matrices");
        if (first_value.has_value() == mix.is_first()) throw nb::value_error("values of the first layer are missing, or too many");
        TimeMix layer = mix.layer();
        DeltaRule& rule = layer.rule;
        rule.n_sequences = in.batch.n_sequences, rule.n_tokens = in.batch.n_tokens;
        rule.before = shaped(state, "state", {rule.n_sequences, rule.n_heads, rule.width, rule.width});
        rule.first_value = shaped(first_value, "first_value", {n_rows, width});
        const float* before = shaped(last, "last", {rule.n_sequences, 1, width});
        Room y(x.size()), value(x.size()), after(state.size());
        rule.y = y.get(), rule.after = after.get();
        {
            nb::gil_scoped_release unlocked;
            slm::time_mix(kernels_, *pool_, layer, in.batch, in.rows, before, value.get());
        }
        return nb::make_tuple(owned<HeadArray>(std::move(y), {rule.n_sequences, rule.n_tokens, width}),
                              owned<FloatMatrix>(std::move(value), {n_rows, width}),
                              owned<StateArray>(std::move(after), {rule.n_sequences, rule.n_heads, rule.width, rule.width}));
    }

    HeadArray channel_mix(const Array& x, const Array& last, const ChannelMixHandle& mix) const {
        const Entered in = entered(x, "x");
        if (!mix.is_of(kernels_)) throw nb::value_error(other_kernels);
        if (in.width != mix.width()) throw nb::value_error("x does not fit the matrices");
        const float* before = shaped(last, "last", {in.batch.n_sequences, 1, in.width});
        Room y(x.size());
        {
            nb::gil_scoped_release unlocked;
            slm::channel_mix(kernels_, *pool_, mix.layer(), in.batch, in.rows, before, nullptr, y.get());
        }
        return owned<HeadArray>(std::move(y), {in.batch.n_sequences, in.batch.n_tokens, in.width});
    }

    nb::tuple rwkv_blocks(const Array& x, const std::vector<const RwkvBlockHandle*>& blocks, const std::vector<Remembered>& before,
                          const MaybeArray& first_value) const {
        const Entered in = entered(x, "x");
        if (blocks.empty() || blocks.size() != before.size()) throw nb::value_error("no blocks, or not a state for each");
        if (first_value.has_value() == blocks[0]->is_first()) throw nb::value_error("values of the first layer are missing, or too many");
        std::vector<RwkvStates> states;
        std::vector<RoomsAfter> after;
        for (std::size_t i = 0; i < blocks.size(); ++i) {
            if (i && blocks[i]->is_first()) throw nb::value_error("a first block behind another");
            const auto& [last, state, channel_last] = before[i];
            states.push_back(checked(*blocks[i], in, last, state, channel_last));
            after.emplace_back(last.size(), state.size());
            states.back().last_after = after.back().last.get(), states.back().state_after = after.back().state.get();
            states.back().channel_last_after = after.back().channel_last.get();
        }
        const float* given = shaped(first_value, "first_value", {in.batch.n_rows(), in.width});
        Room y(x.size()), values(x.size());
        {
            nb::gil_scoped_release unlocked;
            std::memcpy(y.get(), in.rows, x.size() * sizeof(float));
            if (given) std::memcpy(values.get(), given, x.size() * sizeof(float));
            for (std::size_t i = 0; i < blocks.size(); ++i)
                slm::rwkv_block(kernels_, *pool_, blocks[i]->block(), in.batch, states[i], values.get(), y.get());
        }
        nb::list left;
        for (std::size_t i = 0; i < blocks.size(); ++i) {
            const DeltaRule& rule = blocks[i]->time().rule;
            const std::size_t n = in.batch.n_sequences, heads = rule.n_heads, width = rule.width;
            left.append(nb::make_tuple(owned<HeadArray>(std::move(after[i].last), {n, 1, in.width}),
                                       owned<StateArray>(std::move(after[i].state), {n, heads, width, width}),
                                       owned<HeadArray>(std::move(after[i].channel_last), {n, 1, in.width})));
        }
        return nb::make_tuple(owned<HeadArray>(std::move(y), {in.batch.n_sequences, in.batch.n_tokens, in.width}),
                              owned<FloatMatrix>(std::move(values), {in.batch.n_rows(), in.width}), left);
    }

private:
    void check(const Weights& weights) const {
        if (weights.kernels != &kernels_) throw nb::value_error(other_kernels);
    }

    // What a block remembers of the sequences that enter, before the batch.
    RwkvStates checked(const RwkvBlockHandle& block, const Entered& in, const Array& last, const Array& state,
                       const Array& channel_last) const {
        if (!block.is_of(kernels_)) throw nb::value_error(other_kernels);
        if (in.width != block.width()) throw nb::value_error("x does not fit the matrices");
        const DeltaRule& rule = block.time().rule;
        const std::size_t n = in.batch.n_sequences;
        return {shaped(last, "last", {n, 1, in.width}), shaped(state, "state", {n, rule.n_heads, rule.width, rule.width}),
                shaped(channel_last, "channel_last", {n, 1, in.width}), nullptr, nullptr, nullptr};
    }

    // y, the window and the state after the batch, as `compute` leaves them.
    template <class Compute>
    static nb::tuple with_states(Sequences batch, std::size_t n_inner, std::size_t convolved, std::size_t n_taps, const Array& window,
                                 const Array& state, const float* before, const Compute& compute) {
        const float* window_before = shaped(window, "window", {batch.n_sequences, n_taps - 1, convolved});
        Room y(batch.n_rows() * n_inner), window_after(window.size()), state_after(state.size());
        {
            nb::gil_scoped_release unlocked;
            compute({window_before, before, window_after.get(), state_after.get()}, y.get());
        }
        return nb::make_tuple(owned<HeadArray>(std::move(y), {batch.n_sequences, batch.n_tokens, n_inner}),
                              owned<HeadArray>(std::move(window_after), {batch.n_sequences, n_taps - 1, convolved}),
                              owned<StateArray>(std::move(state_after), {state.shape(0), state.shape(1), state.shape(2), state.shape(3)}));
    }

    const IsaKernels& kernels_;
    std::shared_ptr<Pool> pool_;
};

void bind_rwkv(nb::module_& module) {
    nb::class_<TimeMixHandle>(module, "TimeMix",
                              "The weights of RWKV-7's time mixing; keeps them.\n\n"
                              "Args:\n"
                              "    shares: [6, E], of the token before, for receptance, decay, key, value, rate and gate.\n"
                              "    matrices: receptance, key, value; then down and up of decay, rate, gate, and but for the\n"
                              "        model's first layer, of the share of that one's values.\n"
                              "    rows: [E] each: what is added to decay and rate, key_removed, key_rate, bonus, the weight and\n"
                              "        the bias of the norm of heads, and but for the first layer, what is added to that share.\n"
                              "    unit: [P], the weight of the norm of what is taken out of the state, with its epsilon.\n"
                              "    norm_eps: of the norm of heads.\n"
                              "    slowest: what the logarithm of a decay is a share of.\n\n"
                              "Raises:\n"
                              "    TypeError: a wrong dtype, or no CPU array.\n"
                              "    ValueError: shapes that do not fit each other.")
        .def(nb::init<const Array&, std::vector<Weights>, std::vector<Array>, const Array&, float, float, float>(), "shares"_a,
             "matrices"_a, "rows"_a, "unit"_a, "unit_eps"_a, "norm_eps"_a, "slowest"_a);
    nb::class_<ChannelMixHandle>(module, "ChannelMix",
                                 "The weights of RWKV-7's channel mixing, share [E], up (F, E) and down (E, F); raises as TimeMix.")
        .def(nb::init<const Array&, const Weights&, const Weights&>(), "share"_a, "up"_a, "down"_a);
    nb::class_<RwkvBlockHandle>(module, "RwkvBlock", "A block of RWKV-7: both mixings, each behind its norm; raises as TimeMix.")
        .def(nb::init<const NormHandle&, const TimeMixHandle&, const LinearHandle&, const NormHandle&, const ChannelMixHandle&>(),
             nb::keep_alive<1, 3>(), nb::keep_alive<1, 6>(), "time_norm"_a, "time"_a, "output"_a, "channel_norm"_a, "channel"_a);
}

void bind_kernels(nb::module_& module) {
    nb::class_<StateKernels>(module, "StateKernels",
                             "Layers with a state, on the kernels of one instruction set and some threads; see Kernels.\n\n"
                             "All arrays are float32 and C-contiguous, of B sequences with T tokens each, at least one; no call holds\n"
                             "the GIL while it computes, or changes what it is given. All raise TypeError for a wrong dtype or no CPU\n"
                             "array, ValueError for a wrong shape or layout and for weights of another instruction set.")
        .def(nb::init<const std::string&, int>(), "isa"_a, "n_threads"_a)
        .def("selective_scan", &StateKernels::selective_scan, "x"_a, "steps"_a, "a"_a, "b"_a, "c"_a, "state"_a,
             "A selective state space, token by token: y and the state after the last token.\n\n"
             "Args:\n"
             "    x: [B, T, H, P].\n"
             "    steps: before softplus [B, T, H].\n"
             "    a: rates [H, 1] or [H, N].\n"
             "    b: [B, T, G, N], H a multiple of G.\n"
             "    c: likewise.\n"
             "    state: before the first token [B, H, P, N].")
        .def("gated_convolution", &StateKernels::gated_convolution, "projected"_a, "window"_a, "taps"_a,
             "Of projected [B, T, b | c | x] c times the convolution of b * x with taps [W, E]: that [B, T, E], and the\n"
             "window [B, W - 1, E] after the last token.")
        .def("mamba", &StateKernels::mamba, "projected"_a, "window"_a, "state"_a, "taps"_a, "conv_bias"_a.none(), "select"_a,
             "step_norm"_a.none(), "b_norm"_a.none(), "c_norm"_a.none(), "epsilons"_a, "steps"_a, "step_bias"_a.none(), "a"_a, "d"_a,
             "Mamba between its input and its output matrix: y [B, T, D], the window and the state after the last token.\n\n"
             "Args:\n"
             "    projected: [B, T, 2D], what the convolution takes and then the gate.\n"
             "    window: before the first token [B, W - 1, D].\n"
             "    state: likewise [B, D, 1, N].\n"
             "    taps: [W, D].\n"
             "    conv_bias: [D].\n"
             "    select: (R + 2N, D).\n"
             "    step_norm: [R], b_norm and c_norm: [N], with an epsilon each.\n"
             "    steps: (D, R), and step_bias [D].\n"
             "    a: [D, N].\n"
             "    d: [D].")
        .def("mamba2", &StateKernels::mamba2, "projected"_a, "window"_a, "state"_a, "taps"_a, "conv_bias"_a.none(), "step_bias"_a, "a"_a,
             "d"_a, "norm"_a.none(), "eps"_a, "n_groups"_a,
             "Mamba 2 between its input and its output matrix: y [B, T, D], the window and the state after the last token.\n\n"
             "Args:\n"
             "    projected: [B, T, D + C + H], the gate, the C = D + 2GN channels of the convolution, and step sizes.\n"
             "    window: before the first token [B, W - 1, C].\n"
             "    state: likewise [B, H, D / H, N].\n"
             "    taps: [W, C].\n"
             "    conv_bias: [C].\n"
             "    step_bias: [H].\n"
             "    a: [H, 1], as is d.\n"
             "    norm: [G, D / G], with its epsilon.\n"
             "    n_groups: G.")
        .def("time_mix", &StateKernels::time_mix, "x"_a, "last"_a, "state"_a, "first_value"_a.none(), "mix"_a,
             "RWKV-7's time mixing up to its output matrix: y [B, T, E], values [B * T, E], the state after the last token.\n\n"
             "Args:\n"
             "    x: [B, T, E].\n"
             "    last: the token before [B, 1, E].\n"
             "    state: before the first token [B, H, P, P].\n"
             "    first_value: values of the model's first layer [B * T, E]; None in that.\n"
             "    mix: the weights.")
        .def("channel_mix", &StateKernels::channel_mix, "x"_a, "last"_a, "mix"_a,
             "RWKV-7's channel mixing of x [B, T, E] and the tokens before, last [B, 1, E]: [B, T, E].")
        .def("rwkv_blocks", &StateKernels::rwkv_blocks, "x"_a, "blocks"_a, "before"_a, "first_value"_a.none(),
             "RWKV-7's blocks one after another: y [B, T, E], the first block's values [B * T, E], and what each remembers.\n\n"
             "Args:\n"
             "    x: what enters the first of them [B, T, E].\n"
             "    blocks: at least one; only the first may be the model's first.\n"
             "    before: of each the last token that time mixing saw [B, 1, E], its state [B, H, P, P], and the last that\n"
             "        channel mixing saw [B, 1, E]; what comes out is the same.\n"
             "    first_value: values of the model's first block [B * T, E]; None where it is among these.");
}

}  // namespace

void bind_states(nb::module_& module) {
    bind_rwkv(module);
    bind_kernels(module);
}

}  // namespace slm::python
