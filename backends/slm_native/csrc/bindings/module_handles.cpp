// Python bindings of handles: weights, cache layers, norms, layers and their parts.
#include "bindings/module_handles.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/layer_handle.h"
#include "bindings/moe_handle.h"

namespace slm::python {

namespace {

using namespace nb::literals;

void new_layer(LayerHandle* self, std::vector<MaybeLinear> linears, std::vector<MaybeNorm> norms,
               const Activation& activation, std::size_t head_dim, float scale, float softcap, std::int64_t window,
               const MaybeArray& slopes, const MaybeArray& sinks, float limit, float residual_scale, bool parallel,
               std::optional<float> threshold, std::optional<LatentHandle> latent, const MoeHandle* moe,
               std::optional<AltUpHandle> altup, std::optional<EmbeddingHandle> embedding, float output_scale) {
    new (self) LayerHandle(std::move(linears), std::move(norms), activation, head_dim, scale, softcap, window, slopes,
                           sinks, limit, residual_scale, parallel, threshold,
                           {std::move(latent), moe, std::move(altup), std::move(embedding), output_scale});
}

void bind_places(nb::module_& module) {
    // NOLINTNEXTLINE(bugprone-unused-raii): the constructor binds the class.
    nb::class_<Weights>(module, "Weights", "A matrix of weights as it lies in a file; keeps the array that holds it.");
    nb::class_<CacheLayer>(module, "CacheLayer", "Keys and values of one layer; keeps the array that holds the pages.")
        .def_static("of", &new_cache_layer, "pages"_a.noconvert(), "keys"_a, "values"_a, "n_layers"_a, "layer"_a,
                    "n_kv_heads"_a, "head_dim"_a,
                    "A layer of pages as slm_native.kv.PageLayout lays them out; copies nothing.\n\n"
                    "Args:\n"
                    "    pages: uint8 [n_pages, page_bytes], writable.\n"
                    "    keys: KV type of the keys.\n"
                    "    values: KV type of the values; \"\" where keys are the values, too, and lie in one place.\n"
                    "    n_layers: layers of a page.\n"
                    "    layer: which of them.\n"
                    "    n_kv_heads: K.\n"
                    "    head_dim: D.\n\n"
                    "Raises:\n"
                    "    ValueError: an unknown type, or sizes that do not make a page.");
    nb::class_<Batch>(module, "Batch",
                      "The runs of a batch: each takes the next of its tokens and the next of the pages.\n\n"
                      "Args:\n"
                      "    tokens: int32 [T], places in the batch.\n"
                      "    pages: int32, the pages of each run, as many as hold its positions.\n"
                      "    n_tokens: int32, the tokens of each run.\n"
                      "    n_held: int32, the positions of each run, those of its tokens the last.\n"
                      "    bidirectional: int32, of each run whether its tokens all see each other.\n\n"
                      "Raises:\n"
                      "    TypeError: a wrong dtype, or no CPU array.\n"
                      "    ValueError: numbers that do not fit each other.")
        .def(nb::init<const Array&, const Array&, const Array&, const Array&, const Array&>(), "tokens"_a, "pages"_a,
             "n_tokens"_a, "n_held"_a, "bidirectional"_a);
    nb::class_<Angles>(module, "Angles", "Angles by which the heads of a batch are rotated; keeps their arrays.")
        .def_static("of", &new_angles, "cos"_a, "sin"_a, "interleaved"_a,
                    "Angles: cos and sin, float32 [T, R/2]; with R = 0, heads are not rotated.\n\n"
                    "Raises:\n"
                    "    TypeError: a wrong dtype, or no CPU array.\n"
                    "    ValueError: a wrong shape or layout.");
}

void bind_parts(nb::module_& module) {
    nb::class_<NormHandle>(module, "Norm", "A norm; keeps its arrays.")
        .def_static("of", &new_norm, "weight"_a, "bias"_a.none(), "eps"_a, "centred"_a,
                    "A root mean square norm, or a layer norm where centred.\n\n"
                    "Args:\n"
                    "    weight: float32 [width], or [rows, width] for one row after another, in turn.\n"
                    "    bias: likewise, or None.\n"
                    "    eps: added to the mean square.\n"
                    "    centred: whether the mean is taken off first.\n\n"
                    "Raises:\n"
                    "    TypeError: a wrong dtype, or no CPU array.\n"
                    "    ValueError: a wrong shape or layout.");
    nb::class_<LinearHandle>(module, "Linear", "A matrix, the factor on its product, and a bias and a low-rank change.")
        .def(nb::init<const Weights&, float, const MaybeArray&, const std::optional<Weights>&, const MaybeArray&>(),
             "weights"_a, "scale"_a, "bias"_a.none(), "lora_a"_a.none(), "lora_b"_a.none());
    nb::class_<slm::Activation>(module, "Activation", "The nonlinearity of a feed-forward layer.")
        .def_static("of", &activation_of, "name"_a, "numbers"_a,
                    "One by the value of slm_core.architectures.Activation, or \"xielu\" with its four numbers.\n\n"
                    "Raises:\n"
                    "    ValueError: an unknown one, or other numbers.");
}

void bind_layers(nb::module_& module) {
    nb::class_<LatentHandle>(module, "Latent",
                             "Attention to latents as slm_native.kernels.LatentAttention has it; keeps its weights.\n\n"
                             "Raises:\n"
                             "    ValueError: shapes that do not fit each other.")
        .def(nb::init<const MaybeLinear&, const MaybeNorm&, const LinearHandle&, const LinearHandle&, const MaybeNorm&,
                      std::vector<Weights>, std::vector<Weights>>(),
             "q_down"_a.none(), "q_norm"_a.none(), "q"_a, "kv_down"_a, "kv_norm"_a.none(), "k_up"_a, "v_up"_a);
    nb::class_<AltUpHandle>(module, "AltUp",
                            "How a block's streams are predicted and corrected, as slm_native.kernels.AltUp has it.")
        .def(nb::init<const LinearHandle&, const NormHandle&, const LinearHandle&, const LinearHandle&, const Array&,
                      std::size_t>(),
             "router"_a, "router_norm"_a, "predict"_a, "correct"_a, "scale"_a, "active"_a);
    nb::class_<EmbeddingHandle>(module, "LayerEmbedding", "How a block adds its own embedding of each token.")
        .def(nb::init<const LinearHandle&, const LinearHandle&, const MaybeNorm&>(), "gate"_a, "project"_a,
             "norm"_a.none());
    nb::class_<LayerHandle>(
        module, "Layer",
        "A transformer layer, made of the steps that slm_native.kernels.cpu.fusion joins; keeps its weights.\n\n"
        "Args:\n"
        "    linears: q, k, v, output, gate, up, down, left, right, or None in the place of one.\n"
        "    norms: attn_norm, q_norm, k_norm, v_norm, attn_post_norm, ffn_norm, ffn_post_norm, right_norm, likewise.\n"
        "    activation: of the feed-forward layer.\n"
        "    head_dim: the width of a head.\n"
        "    scale, softcap, window, slopes, sinks: as attend takes them.\n"
        "    limit: q, k and v are clamped to -limit .. limit; 0 for none.\n"
        "    residual_scale: of what is added to x.\n"
        "    parallel: whether the feed-forward layer reads what the attention reads.\n"
        "    threshold: as gate_up takes it.\n"
        "    latent: of attention to latents, in the place of q, k and v.\n"
        "    moe: experts in the place of a feed-forward layer.\n"
        "    altup: where there are several streams.\n"
        "    embedding: how the layer adds its own embedding of each token.\n"
        "    output_scale: of what leaves the layer.\n\n"
        "Raises:\n"
        "    TypeError: a wrong dtype, or no CPU array.\n"
        "    ValueError: shapes that do not fit each other.")
        .def("__init__", &new_layer, nb::keep_alive<1, 16>(), "linears"_a, "norms"_a, "activation"_a, "head_dim"_a,
             "scale"_a, "softcap"_a, "window"_a, "slopes"_a.none(), "sinks"_a.none(), "limit"_a, "residual_scale"_a,
             "parallel"_a, "threshold"_a.none(), "latent"_a.none(), "moe"_a.none(), "altup"_a.none(),
             "embedding"_a.none(), "output_scale"_a);
}

void bind_moe(nb::module_& module) {
    nb::class_<slm::RoutingOptions>(module, "RoutingOptions",
                                    "How experts are chosen; see slm_core.architectures.ExpertsSpec.")
        .def_static("of", &new_routing, "gating"_a, "n_experts"_a, "n_used"_a, "normalized"_a, "scale"_a, "n_groups"_a,
                    "n_groups_used"_a,
                    "Raises:\n"
                    "    ValueError: an unknown gating, or numbers that do not fit each other.");
    nb::class_<MoeHandle>(
        module, "MoeLayer",
        "A layer of experts as slm_native.kernels.Experts has it; keeps its weights.\n\n"
        "Args: the router and the selection bias, float32 [X] or None; how experts are chosen; gates, none where\n"
        "experts have none, ups and downs, one for each expert; the activation; whether weights go before the\n"
        "experts; gate or None, up and down of the shared expert, or nothing; and its gate to one number.\n\n"
        "Raises:\n"
        "    TypeError: a wrong dtype, or no CPU array.\n"
        "    ValueError: shapes that do not fit each other.")
        .def(nb::init<const LinearHandle&, const MaybeArray&, const slm::RoutingOptions&, std::vector<LinearHandle>,
                      std::vector<LinearHandle>, std::vector<LinearHandle>, const slm::Activation&, bool,
                      std::vector<MaybeLinear>, const MaybeLinear&>(),
             "router"_a, "selection_bias"_a.none(), "routing"_a, "gates"_a, "ups"_a, "downs"_a, "activation"_a,
             "scales_input"_a, "shared"_a, "shared_gate"_a.none());
}

}  // namespace

void bind_handles(nb::module_& module) {
    bind_places(module);
    bind_parts(module);
    bind_moe(module);
    bind_layers(module);
}

}  // namespace slm::python
