// Python bindings: they only check arguments.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "matmul/embedding.h"
#include "bindings/handles.h"
#include "isa.h"
#include "bindings/layer_handle.h"
#include "layers/layers.h"
#include "bindings/moe_handle.h"
#include "bindings/module_handles.h"
#include "bindings/module_recurrent.h"
#include "matmul/products.h"

namespace slm::python {

namespace {

using namespace nb::literals;

class Kernels {
public:
    Kernels(const std::string& isa, int n_threads) : kernels_(kernels_of(find_isa(isa))) {
        require(n_threads >= 1, "n_threads is ", n_threads);
        pool_ = Pool::shared(n_threads);
    }

    std::vector<int> types() const {
        std::vector<int> types;
        types.reserve(kernels_.n_floats + kernels_.n_formats);
        for (std::size_t i = 0; i < kernels_.n_floats; ++i) types.push_back(kernels_.floats[i].type);
        for (std::size_t i = 0; i < kernels_.n_formats; ++i) types.push_back(kernels_.formats[i].type);
        return types;
    }

    Weights matrix(const Array& data, int type, std::size_t n_out, std::size_t n_in) const {
        const auto* bytes = elements<std::uint8_t>(data, "data", "uint8", 1);
        require(n_in != 0, "rows have no weights");
        Matrix m{nullptr, nullptr, bytes, n_out, n_in, 0};
        for (std::size_t i = 0; i < kernels_.n_floats; ++i)
            if (kernels_.floats[i].type == type) m.floats = &kernels_.floats[i], m.row_bytes = n_in * m.floats->bytes;
        for (std::size_t i = 0; i < kernels_.n_formats; ++i)
            if (const FormatKernels& f = kernels_.formats[i]; f.type == type) {
                require(n_in % std::size_t(f.block) == 0, "rows of ", n_in,
                        " weights are not a multiple of the block size ", f.block);
                m.format = &f, m.row_bytes = n_in / std::size_t(f.block) * f.block_bytes;
            }
        require(m.format || m.floats, "no kernel for ggml type ", type);
        require(data.shape(0) == n_out * m.row_bytes, "data has ", data.shape(0), " bytes, a matrix of ", n_out, " x ",
                n_in, " takes ", n_out * m.row_bytes);
        return {m, &kernels_, data};
    }

    FloatMatrix embed(const Weights& weights, const Array& ids) const {
        const auto* rows = elements<std::int32_t>(ids, "ids", "int32", 1);
        const Matrix& m = weights.matrix;
        const std::size_t n = ids.size();
        check(weights);
        if (const auto [least, most] = std::minmax_element(rows, rows + n);
            n && (*least < 0 || std::size_t(*most) >= m.n_out))
            throw nb::index_error(message("row ids span ", *least, " to ", *most, ", the matrix has rows 0 to ",
                                          std::int64_t(m.n_out) - 1)
                                      .c_str());
        Buffer y(n * m.n_in);
        {
            nb::gil_scoped_release unlocked;
            slm::embed(*pool_, m, {rows, n}, y.get());
        }
        return owned<FloatMatrix>(std::move(y), {n, m.n_in});
    }

    FloatMatrix matmul(const Array& x, const Weights& weights) const {
        const float* values = elements<float>(x, "x", "float32", 2);
        const Matrix& m = weights.matrix;
        const std::size_t n_tokens = x.shape(0);
        check(weights);
        require(x.shape(1) == m.n_in, "x has rows of ", x.shape(1), ", the matrix takes ", m.n_in);
        Buffer y(n_tokens * m.n_out);
        {
            nb::gil_scoped_release unlocked;
            const Product product{&m, y.get()};
            slm::multiply(kernels_, *pool_, values, n_tokens, {&product, 1});
        }
        return owned<FloatMatrix>(std::move(y), {n_tokens, m.n_out});
    }

    FloatMatrix normalize(const Array& x, const NormHandle& norm) const {
        const float* values = elements<float>(x, "x", "float32", 2);
        const std::size_t n = x.size(), width = norm.norm.width * norm.norm.n_rows;
        require(x.shape(1) == width, "x has rows of ", x.shape(1), ", the norm takes ", width);
        Buffer y(n);
        {
            nb::gil_scoped_release unlocked;
            slm::normalize(kernels_, *pool_, values, n, norm.norm, y.get());
        }
        return owned<FloatMatrix>(std::move(y), {x.shape(0), width});
    }

    nb::list project(const Array& x, const NormHandle* norm, const std::vector<const LinearHandle*>& linears) const {
        require(!linears.empty(), "no weights");
        const Activations a = activations(x, *linears[0], norm);
        nb::list outputs;
        std::vector<Linear> native_linears;
        std::vector<float*> results;
        for (const LinearHandle* one : linears) {
            check(one->weights);
            require(one->weights.matrix.n_in == a.width, "the matrices have rows of different widths");
            Buffer y(a.n_tokens * one->weights.matrix.n_out);
            native_linears.push_back(one->linear()), results.push_back(y.get());
            outputs.append(owned<FloatMatrix>(std::move(y), {a.n_tokens, one->weights.matrix.n_out}));
        }
        std::vector<Projection> projections;
        projections.reserve(native_linears.size());
        for (std::size_t i = 0; i < native_linears.size(); ++i) projections.push_back({&native_linears[i], results[i]});
        nb::gil_scoped_release unlocked;
        slm::project(kernels_, *pool_, a.values, a.n_tokens, a.norm, projections);
        return outputs;
    }

    FloatMatrix gate_up(const Array& x, const NormHandle* norm, const LinearHandle* gate, const LinearHandle& up,
                        const Activation& activation, std::optional<float> threshold) const {
        const Activations a = activations(x, up, norm);
        if (gate) check(gate->weights);
        require(
            !gate || (gate->weights.matrix.n_in == a.width && gate->weights.matrix.n_out == up.weights.matrix.n_out),
            "gate and up have different shapes");
        check_gated(activation, gate != nullptr);
        require(!threshold || gate, "a threshold without a gate");
        const std::size_t n_out = up.weights.matrix.n_out;
        Buffer y(a.n_tokens * n_out);
        {
            nb::gil_scoped_release unlocked;
            const GateUp gating{gate ? gate->linear() : Linear{}, up.linear(), activation, threshold};
            slm::gate_up(kernels_, *pool_, a.values, a.n_tokens, a.norm, gating, y.get());
        }
        return owned<FloatMatrix>(std::move(y), {a.n_tokens, n_out});
    }

    FloatMatrix activate(const Array& gate, const std::optional<Array>& up, const Activation& activation) const {
        const float* gates = elements<float>(gate, "gate", "float32", 2);
        const float* ups = up ? elements<float>(*up, "up", "float32", 2) : nullptr;
        require(!up || (up->shape(0) == gate.shape(0) && up->shape(1) == gate.shape(1)),
                "gate and up have different shapes");
        check_gated(activation, ups != nullptr);
        Buffer y(gate.size());
        {
            nb::gil_scoped_release unlocked;
            slm::activate(kernels_, *pool_, gates, ups, gate.size(), activation, y.get());
        }
        return owned<FloatMatrix>(std::move(y), {gate.shape(0), gate.shape(1)});
    }

    // x[i] + the sum over j of x[j] * shares[:, i * n + j], for each i.
    nb::list add_shares(const std::vector<Array>& x, const Array& shares) const {
        require(!x.empty(), "nothing to mix");
        std::vector<const float*> parts;
        for (const Array& each : x) {
            parts.push_back(elements<float>(each, "x", "float32", 2));
            require(each.shape(0) == x[0].shape(0) && each.shape(1) == x[0].shape(1), "arrays differ in shape");
        }
        const float* share = elements<float>(shares, "shares", "float32", 2);
        const std::size_t n = x.size(), n_tokens = x[0].shape(0), width = x[0].shape(1);
        require(shares.shape(0) == n_tokens && shares.shape(1) == n * n, "shares are ", shares);
        nb::list sums;
        std::vector<float*> results;
        for (std::size_t i = 0; i < n; ++i) {
            Buffer y(n_tokens * width);
            results.push_back(y.get());
            sums.append(owned<FloatMatrix>(std::move(y), {n_tokens, width}));
        }
        nb::gil_scoped_release unlocked;
        for (std::size_t i = 0; i < n; ++i)
            slm::add_shares(kernels_, *pool_, parts[i], parts, share + i * n, n * n, n_tokens, width, results[i]);
        return sums;
    }

    HeadArray split_layer_embeddings(const Array& projected, const Array& looked_up, const NormHandle& norm,
                                     float projected_share, float looked_up_share) const {
        const float* rows = elements<float>(projected, "projected", "float32", 2);
        const float* others = elements<float>(looked_up, "looked_up", "float32", 2);
        const std::size_t n_tokens = projected.shape(0), width = norm.norm.width, n_parts = projected.shape(1) / width;
        require(looked_up.shape(0) == n_tokens && looked_up.shape(1) == projected.shape(1),
                "projected and looked_up differ in shape");
        require(norm.norm.n_rows == 1 && n_parts * width == projected.shape(1),
                "rows are not a multiple of the norm's width");
        Buffer y(projected.size());
        {
            nb::gil_scoped_release unlocked;
            slm::split_layer_embeddings(kernels_, *pool_, rows, others, norm.norm, {projected_share, looked_up_share},
                                        n_tokens, n_parts, y.get());
        }
        return owned<HeadArray>(std::move(y), {n_parts, n_tokens, width});
    }

    FloatMatrix add_product(const Array& residual, const Array& x, const LinearHandle& linear) const {
        const Activations a = activations(x, linear, nullptr);
        const float* before = elements<float>(residual, "residual", "float32", 2);
        const std::size_t n_out = linear.weights.matrix.n_out;
        require(residual.shape(0) == a.n_tokens && residual.shape(1) == n_out, "residual has the shape ", residual,
                ", the product [", a.n_tokens, ", ", n_out, "]");
        Buffer y(a.n_tokens * n_out);
        {
            nb::gil_scoped_release unlocked;
            slm::add_product(kernels_, *pool_, a.values, a.n_tokens, linear.linear(), before, y.get());
        }
        return owned<FloatMatrix>(std::move(y), {a.n_tokens, n_out});
    }

    HeadArray rotate_heads(const Array& x, std::size_t width, const NormHandle* norm, const std::optional<Array>& cos,
                           const std::optional<Array>& sin, bool interleaved) const {
        const float* values = elements<float>(x, "x", "float32", 2);
        const std::size_t n_tokens = x.shape(0);
        require(width != 0 && x.shape(1) % width == 0, "x has rows of ", x.shape(1),
                ", not a multiple of the head width ", width);
        Rotation rotation{nullptr, nullptr, 0, interleaved};
        if (cos && sin) {
            rotation = {elements<float>(*cos, "cos", "float32", 2), elements<float>(*sin, "sin", "float32", 2),
                        std::size_t(cos->shape(1)), interleaved};
            require(cos->shape(0) == n_tokens && sin->shape(0) == n_tokens && sin->shape(1) == cos->shape(1) &&
                        2 * cos->shape(1) <= width,
                    "cos and sin must be [tokens, at most head_dim / 2]");
        }
        const Norm by = norm ? norm->norm : Norm{};
        check_heads(norm, width, x.shape(1));
        const std::size_t n_heads = x.shape(1) / width;
        Buffer y(n_tokens * n_heads * width);
        {
            nb::gil_scoped_release unlocked;
            slm::rotate_heads(kernels_, *pool_, values, n_tokens, n_heads, width, by, rotation, y.get());
        }
        return owned<HeadArray>(std::move(y), {n_tokens, n_heads, width});
    }

    void write(const CacheLayer& cache, const Array& pages, const Array& slots, const Array& k, const Array& v) const {
        const KvLayer& layer = cache.layer;
        const auto* page = elements<std::int64_t>(pages, "pages", "int64", 1);
        const auto* slot = elements<std::int64_t>(slots, "slots", "int64", 1);
        const std::size_t n_tokens = pages.shape(0);
        const float* keys = heads(k, "k", n_tokens, layer.n_kv_heads, layer.head_dim);
        const float* values = heads(v, "v", n_tokens, layer.n_kv_heads, layer.head_dim);
        check_slots(layer, pages, slots, n_tokens);
        nb::gil_scoped_release unlocked;
        slm::write(kernels_, *pool_, layer, n_tokens, page, slot, keys, values);
    }

    HeadArray attend(const Array& q, const CacheLayer& cache, const Batch& batch, float scale, float softcap,
                     std::int64_t window, const std::optional<Array>& slopes, const std::optional<Array>& sinks) const {
        const KvLayer& layer = cache.layer;
        const std::size_t n_heads = q.ndim() == 3 ? q.shape(1) : 0;
        const float* queries = heads(q, "q", batch.n_tokens(), n_heads, layer.head_dim);
        require(n_heads != 0 && n_heads % layer.n_kv_heads == 0, "q has ", n_heads,
                " heads, which must be a multiple of ", layer.n_kv_heads);
        require(batch.n_pages() <= layer.n_pages, "a page is out of range");
        const Scoring scoring = scoring_of(scale, softcap, window, slopes, sinks, n_heads);
        const std::size_t n = batch.n_tokens() * n_heads * layer.head_dim;
        Buffer out(n);
        {
            nb::gil_scoped_release unlocked;
            slm::attend(kernels_, *pool_, layer, batch.runs(), scoring, n_heads, queries, out.get());
        }
        return owned<HeadArray>(std::move(out), {batch.n_tokens(), n_heads, layer.head_dim});
    }

    HeadArray run_layers(const std::vector<Array>& x, const std::vector<const LayerHandle*>& layers,
                         const std::vector<const CacheLayer*>& caches, const std::vector<const Angles*>& angles,
                         const std::vector<std::optional<Array>>& embeddings, const Array& pages, const Array& slots,
                         const Batch& batch, const std::optional<std::vector<std::int64_t>>& output_tokens) const {
        require(!x.empty() && !layers.empty(), "no streams, or no layers");
        require(caches.size() == layers.size() && angles.size() == layers.size() && embeddings.size() == layers.size(),
                "layers, caches, angles and embeddings differ in number");
        const std::size_t n_tokens = batch.n_tokens(), width = x[0].ndim() == 2 ? x[0].shape(1) : 0;
        std::vector<const float*> streams;
        streams.reserve(x.size());
        for (const Array& each : x) streams.push_back(stream(each, n_tokens, width));
        std::vector<Layer> checked_layers;
        std::vector<LayerInputs> inputs;
        for (std::size_t i = 0; i < layers.size(); ++i) {
            require(layers[i]->n_streams() == x.size(), "the layers differ in their number of streams");
            checked_layers.push_back(layers[i]->checked(kernels_, width, batch, caches[i]->layer, *angles[i]));
            inputs.push_back({&caches[i]->layer, angles[i]->rotation,
                              embedding_of(embeddings[i], n_tokens, layers[i]->n_embedding())});
            check_slots(caches[i]->layer, pages, slots, n_tokens);
        }
        check_output_tokens(output_tokens, n_tokens);
        Buffer y(x.size() * n_tokens * width);
        for (std::size_t i = 0; i < x.size(); ++i)
            std::copy_n(streams[i], n_tokens * width, y.get() + i * n_tokens * width);
        {
            nb::gil_scoped_release unlocked;
            const Tokens tokens{n_tokens, static_cast<const std::int64_t*>(pages.data()),
                                static_cast<const std::int64_t*>(slots.data()), &batch.runs()};
            slm::run_layers(kernels_, *pool_, checked_layers, inputs, tokens, output_tokens ? &*output_tokens : nullptr,
                            x.size(), y.get());
        }
        return owned<HeadArray>(std::move(y), {x.size(), output_tokens ? output_tokens->size() : n_tokens, width});
    }

    HeadArray multiply_per_head(const Array& x, const std::vector<const Weights*>& weights) const {
        require(!weights.empty(), "no weights");
        const float* values = elements<float>(x, "x", "float32", 3);
        const std::size_t n_tokens = x.shape(0), n_out = weights[0]->matrix.n_out;
        std::vector<const Matrix*> matrices;
        for (const Weights* one : weights) {
            check(*one);
            require(one->matrix.n_in == x.shape(2) && one->matrix.n_out == n_out && x.shape(1) == weights.size(),
                    "there must be one matrix per head of x, all of one shape; the shape of x is ", x);
            matrices.push_back(&one->matrix);
        }
        Buffer y(n_tokens * weights.size() * n_out);
        if (n_tokens) {
            nb::gil_scoped_release unlocked;
            slm::multiply_per_head(kernels_, *pool_, {values, x.shape(2)}, n_tokens, matrices, y.get(), n_out);
        }
        return owned<HeadArray>(std::move(y), {n_tokens, weights.size(), n_out});
    }

    FloatMatrix run_moe(const Array& x, const NormHandle* norm, const std::optional<Array>& router_input,
                        const MoeHandle& handle) const {
        const MoeLayer& moe = handle.checked_for(kernels_);
        const float* values = elements<float>(x, "x", "float32", 2);
        const std::size_t n_tokens = x.shape(0), width = x.shape(1);
        require(width == moe.router.matrix->n_in, "x has rows of ", width, ", the experts take ",
                moe.router.matrix->n_in);
        const Norm by = norm_of_rows(norm, width);
        const float* read = router_input ? elements<float>(*router_input, "router_input", "float32", 2) : nullptr;
        require(!router_input || (router_input->shape(0) == n_tokens && router_input->shape(1) == width),
                "router_input and x differ in shape");
        Buffer y(n_tokens * width);
        {
            nb::gil_scoped_release unlocked;
            slm::run_moe(kernels_, *pool_, moe, values, read, n_tokens, by, {}, y.get());
        }
        return owned<FloatMatrix>(std::move(y), {n_tokens, width});
    }

private:
    // Checked rows of activations.
    struct Activations {
        const float* values;
        std::size_t n_tokens, width;
        Norm norm;
    };

    static void check_heads(const NormHandle* norm, std::size_t width, std::size_t n) {
        if (!norm) return;
        const bool per_head = norm->norm.width == width && (norm->norm.n_rows == 1 || norm->norm.n_rows * width == n);
        require(per_head || (norm->norm.width == n && norm->norm.n_rows == 1),
                "norm must have the width of one head, [heads, head_dim], or the width of all heads");
    }

    // A norm of whole rows, or no norm.
    static Norm norm_of_rows(const NormHandle* norm, std::size_t width) {
        if (!norm) return {};
        require(norm->norm.width == width && norm->norm.n_rows == 1, "norm has ", norm->norm.width, " numbers, not ",
                width);
        return norm->norm;
    }

    static void check_gated(const Activation& activation, bool gated) {
        require(gated || activation.kind != ActivationKind::swiglu_clamped, "swiglu_clamped without a gate");
    }

    static const float* stream(const Array& x, std::size_t n_tokens, std::size_t width) {
        const float* values = elements<float>(x, "x", "float32", 2);
        require(x.shape(0) == n_tokens && x.shape(1) == width,
                "a token is out of range, or the streams differ in shape");
        return values;
    }

    static const float* embedding_of(const std::optional<Array>& embeddings, std::size_t n_tokens, std::size_t width) {
        require(embeddings.has_value() == (width > 0), "exactly the layers with n_embedding need an embedding");
        if (!embeddings) return nullptr;
        const float* values = elements<float>(*embeddings, "layer_embeddings", "float32", 2);
        require(embeddings->shape(0) == n_tokens && embeddings->shape(1) == width, "embeddings are ", *embeddings);
        return values;
    }

    static void check_output_tokens(const std::optional<std::vector<std::int64_t>>& output_tokens,
                                    std::size_t n_tokens) {
        std::int64_t least = 0;
        for (std::int64_t token : output_tokens.value_or(std::vector<std::int64_t>{})) {
            require(token >= least && std::uint64_t(token) < n_tokens,
                    "output_tokens must be ascending indices of tokens of x");
            least = token + 1;
        }
    }

    static void check_slots(const KvLayer& layer, const Array& pages, const Array& slots, std::size_t n_tokens) {
        const auto* page = elements<std::int64_t>(pages, "pages", "int64", 1);
        const auto* slot = elements<std::int64_t>(slots, "slots", "int64", 1);
        require(pages.shape(0) == n_tokens && slots.shape(0) == n_tokens, "pages and slots differ in length");
        for (std::size_t t = 0; t < n_tokens; ++t)
            require(std::uint64_t(page[t]) < layer.n_pages && std::uint64_t(slot[t]) < page_tokens,
                    "a page or slot is out of range");
    }

    void check(const Weights& weights) const { require(weights.kernels == &kernels_, other_kernels); }

    Activations activations(const Array& x, const LinearHandle& linear, const NormHandle* norm) const {
        check(linear.weights);
        const float* values = elements<float>(x, "x", "float32", 2);
        const std::size_t width = x.shape(1), n_in = linear.weights.matrix.n_in;
        require(width == n_in, "x has rows of ", width, ", the matrix takes ", n_in);
        return {values, x.shape(0), width, norm_of_rows(norm, width)};
    }

    static const float* heads(const Array& array, const char* name, std::size_t n_tokens, std::size_t n_heads,
                              std::size_t head_dim) {
        const float* values = elements<float>(array, name, "float32", 3);
        require(array.shape(0) == n_tokens && array.shape(1) == n_heads && array.shape(2) == head_dim, name,
                " must be [", n_tokens, ", ", n_heads, ", ", head_dim, "], not ", array);
        return values;
    }

    const IsaKernels& kernels_;
    std::shared_ptr<Pool> pool_;
};

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (Isa isa : all_isas)
        if (is_available(isa)) names.emplace_back(name_of(isa));
    return names;
}

}  // namespace

}  // namespace slm::python

NB_MODULE(_native, module) {
    using namespace slm::python;
    using namespace nb::literals;
    nb::set_leak_warnings(false);  // daemon threads may hold objects until the process ends
    module.doc() = "C++ kernels of the native engine.";
    module.attr("interface") = SLM_INTERFACE;
    module.def("available_isas", &available_isas,
               "The instruction sets that are compiled in and that this machine supports, the fastest last.");
    bind_handles(module);
    nb::class_<Kernels>(
        module, "Kernels",
        "The kernels of one instruction set, with a thread pool.\n\n"
        "All arrays are aligned, C-contiguous and in CPU memory. A method raises TypeError for a wrong dtype\n"
        "or an array on another device, and ValueError for shapes that do not fit each other or for\n"
        "weights that were prepared by the kernels of another instruction set. Computing methods\n"
        "release the GIL.\n\n"
        "Args:\n"
        "    isa: one of available_isas().\n"
        "    n_threads: the number of threads that compute, at least 1. All Kernels of this process\n"
        "        with the same n_threads share one pool.\n\n"
        "Raises:\n"
        "    ValueError: the instruction set is not available, or n_threads is below 1.\n"
        "    RuntimeError: the system refuses to create threads.")
        .def(nb::init<const std::string&, int>(), "isa"_a, "n_threads"_a)
        .def_prop_ro("types", &Kernels::types, "The ggml type ids that these kernels support.")
        .def("matrix", &Kernels::matrix, "data"_a, "ggml_type"_a, "n_out"_a, "n_in"_a,
             "A weight matrix [n_out, n_in] that refers to `data`, without a copy.\n\n"
             "Args:\n"
             "    data: uint8, the rows of blocks as in a GGUF file; any alignment.\n"
             "    ggml_type: ggml type id of the weights.\n"
             "    n_out: number of rows.\n"
             "    n_in: weights per row, at least 1; a multiple of the block size.\n\n"
             "Raises:\n"
             "    ValueError: also if the type has no kernels.")
        .def("embed", &Kernels::embed, "weights"_a, "ids"_a,
             "Dequantizes rows of a weight matrix: float32 [T, n_in].\n\n"
             "Args:\n"
             "    weights: the matrix.\n"
             "    ids: int32 [T], the rows.\n\n"
             "Raises:\n"
             "    IndexError: the matrix has no such row.")
        .def(
            "matmul", &Kernels::matmul, "x"_a, "weights"_a,
            "x @ weights.T: float32 [T, n_out].\n\n"
            "With quantized weights, x is rounded to int8 with one scale per 32 values, or to bf16 for a matrix unit.\n"
            "With BF16 weights, x may be rounded to bf16. With F32 and F16 weights, x is not rounded.\n\n"
            "Args:\n"
            "    x: float32 [T, n_in].\n"
            "    weights: the matrix.")
        .def("normalize", &Kernels::normalize, "x"_a, "norm"_a,
             "Applies a norm to each row of x: float32, in the shape of x.")
        .def("project", &Kernels::project, "x"_a, "norm"_a.none(), "linears"_a,
             "Applies several linears to x [T, n_in], after a norm or None: a list of float32 [T, n_out].")
        .def(
            "gate_up", &Kernels::gate_up, "x"_a, "norm"_a.none(), "gate"_a.none(), "up"_a, "activation"_a,
            "threshold"_a.none(),
            "activation(gate(x)) * up(x), after a norm or None: float32 [T, n_out]. Without a gate, activation(up(x)).\n\n"
            "With a threshold (gaussian top-k), each row of gate(x) is replaced by max(0, gate(x) - cutoff) before the\n"
            "activation; cutoff is the row's mean plus `threshold` standard deviations.")
        .def("activate", &Kernels::activate, "gate"_a, "up"_a.none(), "activation"_a,
             "activation(gate) * up, elementwise: float32, in the shape of gate. Without up, activation(gate).")
        .def(
            "split_layer_embeddings", &Kernels::split_layer_embeddings, "projected"_a, "looked_up"_a, "norm"_a,
            "projected_share"_a, "looked_up_share"_a,
            "The per-layer embeddings: float32 [L, T, P].\n\n"
            "projected_share * normalize(projected) + looked_up_share * looked_up, both [T, L * P]; the norm applies to\n"
            "each part of P numbers.")
        .def("add_shares", &Kernels::add_shares, "x"_a, "shares"_a,
             "x[i] + the sum over j of x[j] * shares[:, i * n + j], for each i: a list of n arrays like x.\n\n"
             "Args:\n"
             "    x: n arrays, float32 [T, width].\n"
             "    shares: float32 [T, n * n].")
        .def("add_product", &Kernels::add_product, "residual"_a, "x"_a, "linear"_a,
             "residual + linear(x): float32 [T, n_out].")
        .def("rotate_heads", &Kernels::rotate_heads, "x"_a, "width"_a, "norm"_a.none(), "cos"_a.none(), "sin"_a.none(),
             "interleaved"_a,
             "Applies a norm and RoPE to heads: float32 [T, heads, width].\n\n"
             "Args:\n"
             "    x: float32 [T, heads * width].\n"
             "    width: the width of a head.\n"
             "    norm: a norm of [width], [heads, width] or [heads * width]; or None.\n"
             "    cos: float32 [T, R/2], or None without RoPE.\n"
             "    sin: like cos.\n"
             "    interleaved: whether RoPE pairs adjacent values, not values R/2 apart.")
        .def("write", &Kernels::write, "layer"_a, "pages"_a, "slots"_a, "k"_a, "v"_a,
             "Writes the keys and values of T tokens to the KV cache.\n\n"
             "Args:\n"
             "    layer: the cache of the layer.\n"
             "    pages: int64 [T], the page of each token.\n"
             "    slots: int64 [T], the slot of each token on its page.\n"
             "    k: float32 [T, K, D].\n"
             "    v: float32 [T, K, D].\n\n"
             "Raises:\n"
             "    ValueError: also if the cache has no such page or slot.")
        .def("multiply_per_head", &Kernels::multiply_per_head, "x"_a, "weights"_a,
             "Multiplies each head of x [T, H, n_in] by its own matrix: float32 [T, H, n_out].\n\n"
             "`weights` has one matrix per head, all of one shape.")
        .def(
            "run_moe", &Kernels::run_moe, "x"_a, "norm"_a.none(), "router_input"_a.none(), "moe"_a,
            "An MoE layer, with its routing: float32 [T, E].\n\n"
            "The experts of all tokens are computed together. The weights of each used expert are read once per call;\n"
            "unused experts are not read.\n\n"
            "Args:\n"
            "    x: float32 [T, E].\n"
            "    norm: norm of x, or None.\n"
            "    router_input: float32 [T, E], the input of the router; None for the normalized x.\n"
            "    moe: the layer.")
        .def("run_layers", &Kernels::run_layers, "x"_a, "layers"_a, "caches"_a, "angles"_a, "layer_embeddings"_a,
             "pages"_a, "slots"_a, "batch"_a, "output_tokens"_a.none(),
             "Runs transformer layers one after another: float32 [N, T, E], or [N, len(output_tokens), E].\n\n"
             "Args:\n"
             "    x: the N residual streams, float32 [T, E] each; N is 1 unless the layers have AltUp.\n"
             "    layers: the layers, in order.\n"
             "    caches: the KV cache of each layer.\n"
             "    angles: the RoPE angles of each layer.\n"
             "    layer_embeddings: for each layer the per-layer embeddings of the tokens, float32 [T, P], or None.\n"
             "    pages: int64 [T], the page of each token.\n"
             "    slots: int64 [T], the slot of each token on its page.\n"
             "    batch: the sequences of the tokens.\n"
             "    output_tokens: the tokens whose outputs are returned, ascending; None for all tokens.")
        .def("attend", &Kernels::attend, "q"_a, "layer"_a, "batch"_a, "scale"_a, "softcap"_a, "window"_a,
             "slopes"_a.none(), "sinks"_a.none(),
             "Causal attention of T tokens, each over its own sequence: float32 [T, H, D].\n\n"
             "Args:\n"
             "    q: float32 [T, H, D]; H is a multiple of K.\n"
             "    layer: the cache of the layer, which already has the keys and values of these tokens.\n"
             "    batch: the sequences of the tokens.\n"
             "    scale: factor on attention scores.\n"
             "    softcap: c in c * tanh(score / c); 0 for none.\n"
             "    window: the number of positions that a query attends to, its own included; 0 for all.\n"
             "    slopes: ALiBi's slopes, float32 [H]; or None.\n"
             "    sinks: attention sinks, float32 [H]; or None.\n\n"
             "Raises:\n"
             "    ValueError: also if the cache lacks a page of the batch.");
    bind_recurrent(module);
}
