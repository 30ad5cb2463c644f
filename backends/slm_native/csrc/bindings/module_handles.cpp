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

void bind_cache(nb::module_& module) {
    // NOLINTNEXTLINE(bugprone-unused-raii): the constructor binds the class.
    nb::class_<Weights>(module, "Weights",
                        "A weight matrix in the layout of its file. It keeps the array of the weights alive.");
    nb::class_<CacheLayer>(module, "CacheLayer", "The KV cache of one layer. It keeps the array of the pages alive.")
        .def_static("of", &new_cache_layer, "pages"_a.noconvert(), "keys"_a, "values"_a, "n_layers"_a, "layer"_a,
                    "n_kv_heads"_a, "head_dim"_a,
                    "The cache of a layer on pages in the layout of slm_native.kv.PageLayout, without a copy.\n\n"
                    "Args:\n"
                    "    pages: uint8 [n_pages, page_bytes], writable.\n"
                    "    keys: KV type of the keys.\n"
                    "    values: KV type of the values; \"\" if the values are the keys and are stored once.\n"
                    "    n_layers: number of layers on a page.\n"
                    "    layer: index of the layer.\n"
                    "    n_kv_heads: K.\n"
                    "    head_dim: D.\n\n"
                    "Raises:\n"
                    "    ValueError: an unknown type, or sizes that do not add up to page_bytes.");
    nb::class_<Batch>(module, "Batch",
                      "The runs of a batch. A run is the tokens of one sequence; see Run in slm_native/kv/plan.py.\n\n"
                      "`tokens` and `pages` have the entries of all runs, one run after another.\n\n"
                      "Args:\n"
                      "    tokens: int32 [T], indices in the batch.\n"
                      "    pages: int32, the pages of each sequence, ceil(n_held / 64) per run.\n"
                      "    n_tokens: int32, the number of tokens of each run.\n"
                      "    n_held: int32, the number of positions of each sequence, with the run's tokens at the end.\n"
                      "    bidirectional: int32, whether each run is a bidirectional block.\n\n"
                      "Raises:\n"
                      "    TypeError: a wrong dtype, or not a CPU array.\n"
                      "    ValueError: arrays that do not fit each other.")
        .def(nb::init<const Array&, const Array&, const Array&, const Array&, const Array&>(), "tokens"_a, "pages"_a,
             "n_tokens"_a, "n_held"_a, "bidirectional"_a);
    nb::class_<Angles>(module, "Angles", "The RoPE angles of a batch. They keep their arrays alive.")
        .def_static("of", &new_angles, "cos"_a, "sin"_a, "interleaved"_a,
                    "Angles from cos and sin, float32 [T, R/2]. With R = 0, heads are not rotated.\n\n"
                    "Raises:\n"
                    "    TypeError: a wrong dtype, or not a CPU array.\n"
                    "    ValueError: a wrong shape or layout.");
}

void bind_parts(nb::module_& module) {
    nb::class_<NormHandle>(module, "Norm", "A norm. It keeps its arrays alive.")
        .def_static("of", &new_norm, "weight"_a, "bias"_a.none(), "eps"_a, "centred"_a,
                    "An RMS norm, or a layer norm if `centred`.\n\n"
                    "Args:\n"
                    "    weight: float32 [width], or [rows, width], applied to the rows of x cyclically.\n"
                    "    bias: like weight, or None.\n"
                    "    eps: added to the mean square.\n"
                    "    centred: whether the mean is subtracted first.\n\n"
                    "Raises:\n"
                    "    TypeError: a wrong dtype, or not a CPU array.\n"
                    "    ValueError: a wrong shape or layout.");
    nb::class_<LinearHandle>(
        module, "Linear", "A matrix, a scale and a bias for its product, and the low-rank change of an adapter (LoRA).")
        .def(nb::init<const Weights&, float, const MaybeArray&, const std::optional<Weights>&, const MaybeArray&>(),
             "weights"_a, "scale"_a, "bias"_a.none(), "lora_a"_a.none(), "lora_b"_a.none());
    nb::class_<slm::Activation>(module, "Activation", "The nonlinearity of a feed-forward layer.")
        .def_static("of", &activation_of, "name"_a, "numbers"_a,
                    "An activation by its value in slm_core.architectures.Activation, without numbers; or \"xielu\"\n"
                    "with alpha_n, alpha_p, beta and eps.\n\n"
                    "Raises:\n"
                    "    ValueError: an unknown activation, or a wrong count of numbers.");
}

void bind_layers(nb::module_& module) {
    nb::class_<LatentHandle>(
        module, "Latent",
        "Multi-head latent attention; see LatentAttention in slm_native/kernels/parameters.py. It keeps\n"
        "its weights alive.\n\n"
        "Raises:\n"
        "    ValueError: shapes that do not fit each other.")
        .def(nb::init<const MaybeLinear&, const MaybeNorm&, const LinearHandle&, const LinearHandle&, const MaybeNorm&,
                      std::vector<Weights>, std::vector<Weights>>(),
             "q_down"_a.none(), "q_norm"_a.none(), "q"_a, "kv_down"_a, "kv_norm"_a.none(), "k_up"_a, "v_up"_a);
    nb::class_<AltUpHandle>(module, "AltUp",
                            "AltUp predict and correct; see slm_native/kernels/altup.py. It keeps its weights alive.")
        .def(nb::init<const LinearHandle&, const NormHandle&, const LinearHandle&, const LinearHandle&, const Array&,
                      std::size_t>(),
             "router"_a, "router_norm"_a, "predict"_a, "correct"_a, "scale"_a, "active"_a);
    nb::class_<EmbeddingHandle>(module, "LayerEmbedding",
                                "The weights that add a per-layer embedding to the output of a layer.")
        .def(nb::init<const LinearHandle&, const LinearHandle&, const MaybeNorm&>(), "gate"_a, "project"_a,
             "norm"_a.none());
    nb::class_<LayerHandle>(
        module, "Layer",
        "A transformer layer; slm_native/kernels/cpu/fusion.py makes it from steps. It keeps its weights alive.\n\n"
        "Args:\n"
        "    linears: q, k, v, output, gate, up, down, left, right (the last two are LAuReL's); None for absent ones.\n"
        "    norms: attn_norm, q_norm, k_norm, v_norm, attn_post_norm, ffn_norm, ffn_post_norm, right_norm; None for\n"
        "        absent ones.\n"
        "    activation: the activation of the feed-forward layer.\n"
        "    head_dim: the width of a head.\n"
        "    scale, softcap, window, slopes, sinks: see Kernels.attend.\n"
        "    limit: q, k and v are clamped to -limit .. limit; 0 for none.\n"
        "    residual_scale: factor on the outputs of attention and feed-forward layer.\n"
        "    parallel: whether attention and feed-forward layer read the same input.\n"
        "    threshold: see Kernels.gate_up.\n"
        "    latent: multi-head latent attention, in place of q, k and v; or None.\n"
        "    moe: an MoE layer in place of the feed-forward layer; or None.\n"
        "    altup: AltUp, if there are several residual streams.\n"
        "    embedding: the weights that add the per-layer embedding; or None.\n"
        "    output_scale: factor on the output of the layer.\n\n"
        "Raises:\n"
        "    TypeError: a wrong dtype, or not a CPU array.\n"
        "    ValueError: shapes that do not fit each other.")
        .def("__init__", &new_layer, nb::keep_alive<1, 16>(), "linears"_a, "norms"_a, "activation"_a, "head_dim"_a,
             "scale"_a, "softcap"_a, "window"_a, "slopes"_a.none(), "sinks"_a.none(), "limit"_a, "residual_scale"_a,
             "parallel"_a, "threshold"_a.none(), "latent"_a.none(), "moe"_a.none(), "altup"_a.none(),
             "embedding"_a.none(), "output_scale"_a);
}

void bind_moe(nb::module_& module) {
    nb::class_<slm::RoutingOptions>(module, "RoutingOptions",
                                    "The selection rule of experts; see slm_core.architectures.ExpertsSpec.")
        .def_static("of", &new_routing, "gating"_a, "n_experts"_a, "n_used"_a, "normalized"_a, "scale"_a, "n_groups"_a,
                    "n_groups_used"_a,
                    "Raises:\n"
                    "    ValueError: an unknown gating, or counts that do not fit each other.");
    nb::class_<MoeHandle>(
        module, "MoeLayer",
        "An MoE layer; see Experts in slm_native/kernels/parameters.py. It keeps its weights alive.\n\n"
        "Args:\n"
        "    router: (X, E).\n"
        "    selection_bias: float32 [X], added to scores for selection only; or None.\n"
        "    routing: the selection rule.\n"
        "    gates: the gate of each expert; empty if experts have no gate.\n"
        "    ups: the up projection of each expert.\n"
        "    downs: the down projection of each expert.\n"
        "    activation: the activation of all experts.\n"
        "    scales_input: whether routing weights multiply the input of an expert, not its output.\n"
        "    shared: gate or None, up and down of the shared expert; empty without a shared expert.\n"
        "    shared_gate: (1, E), the gate of the shared expert; or None.\n\n"
        "Raises:\n"
        "    TypeError: a wrong dtype, or not a CPU array.\n"
        "    ValueError: shapes that do not fit each other.")
        .def(nb::init<const LinearHandle&, const MaybeArray&, const slm::RoutingOptions&, std::vector<LinearHandle>,
                      std::vector<LinearHandle>, std::vector<LinearHandle>, const slm::Activation&, bool,
                      std::vector<MaybeLinear>, const MaybeLinear&>(),
             "router"_a, "selection_bias"_a.none(), "routing"_a, "gates"_a, "ups"_a, "downs"_a, "activation"_a,
             "scales_input"_a, "shared"_a, "shared_gate"_a.none());
}

}  // namespace

void bind_handles(nb::module_& module) {
    bind_cache(module);
    bind_parts(module);
    bind_moe(module);
    bind_layers(module);
}

}  // namespace slm::python
