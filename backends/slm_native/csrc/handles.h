// What Python holds of the kernels' arguments: each keeps the arrays that it points into.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "arrays.h"
#include "attention.h"
#include "isa.h"
#include "layers.h"
#include "products.h"

namespace slm::python {

inline Isa find_isa(const std::string& name) {
    for (Isa isa : all_isas)
        if (name_of(isa) == name && is_available(isa)) return isa;
    throw nb::value_error(("instruction set '" + name + "' is not available here").c_str());
}

// A matrix of weights and the array that holds it.
struct Weights {
    Matrix matrix;
    const IsaKernels* kernels;
    Array owner;
};

inline KvType find_kv_type(const std::string& name) {
    static const char* const names[n_kv_types] = {"f32", "f16", "bf16", "q8_0", "q5_0", "q4_0"};
    for (std::size_t i = 0; i < n_kv_types; ++i)
        if (name == names[i]) return KvType(i);
    throw nb::value_error(("no kernel for KV type '" + name + "'").c_str());
}

using Pages = nb::ndarray<std::uint8_t, nb::device::cpu>;

// Keys and values of one layer and the array that holds them.
struct CacheLayer {
    KvLayer layer;
    Pages owner;
};

inline CacheLayer new_cache_layer(const Pages& pages, const std::string& keys, const std::string& values, std::size_t n_layers,
                           std::size_t layer, std::size_t n_kv_heads, std::size_t head_dim) {
    if (pages.ndim() != 2 || !is_contiguous(Array(pages)))
        throw nb::value_error("pages must be C-contiguous [n_pages, page_bytes]");
    const bool in_keys = values.empty();  // keys are the values, too
    const KvType key_type = find_kv_type(keys), value_type = in_keys ? key_type : find_kv_type(values);
    const KvPlace place{n_layers, layer, n_kv_heads, head_dim};
    return {layer_of(pages.data(), pages.shape(0), pages.shape(1), key_type, value_type, in_keys, place), pages};
}

// Which tokens of a batch belong to which sequence, and which pages those hold.
class Batch {
public:
    Batch(const Array& tokens, const Array& pages, const Array& n_tokens, const Array& n_held, const Array& both_ways)
        : tokens_(copy(tokens, "tokens")), pages_(copy(pages, "pages")), n_batch_(tokens_.size()) {
        const auto* counts = elements<std::int32_t>(n_tokens, "n_tokens", "int32", 1);
        const auto* held = elements<std::int32_t>(n_held, "n_held", "int32", 1);
        const auto* spans = elements<std::int32_t>(both_ways, "both_ways", "int32", 1);
        if (n_tokens.size() != n_held.size() || n_tokens.size() != both_ways.size())
            throw nb::value_error("n_tokens, n_held and both_ways differ in length");
        for (std::int32_t token : tokens_)
            if (token < 0 || std::size_t(token) >= n_batch_) throw nb::value_error("a token that the batch does not have");
        for (std::int32_t page : pages_) {
            if (page < 0) throw nb::value_error("a page below 0");
            n_pages_ = std::max(n_pages_, std::size_t(page) + 1);
        }
        std::size_t token = 0, page = 0;
        for (std::size_t i = 0; i < n_tokens.size(); ++i) {
            if (counts[i] < 1 || held[i] < counts[i]) throw nb::value_error("a run that holds less than it brings, or nothing");
            runs_.push_back({tokens_.data() + token, pages_.data() + page, std::size_t(counts[i]), std::size_t(held[i]), spans[i] != 0});
            token += std::size_t(counts[i]), page += (std::size_t(held[i]) + page_tokens - 1) / page_tokens;
        }
        if (token != n_batch_ || page != pages_.size())
            throw nb::value_error("the runs do not take just the tokens and pages that there are");
    }
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;

    std::size_t n_tokens() const { return n_batch_; }
    std::size_t n_pages() const { return n_pages_; }
    const std::vector<Run>& runs() const { return runs_; }

private:
    static std::vector<std::int32_t> copy(const Array& array, const char* name) {
        const auto* from = elements<std::int32_t>(array, name, "int32", 1);
        return {from, from + array.size()};
    }

    std::vector<std::int32_t> tokens_, pages_;
    std::size_t n_batch_, n_pages_ = 0;
    std::vector<Run> runs_;
};

// Angles by which the heads of a batch are turned.
struct Angles {
    Rotation rotation;
    std::size_t n_tokens;
    Array cos, sin;
};

inline Angles new_angles(const Array& cos, const Array& sin, bool interleaved) {
    const Rotation rotation{elements<float>(cos, "cos", "float32", 2), elements<float>(sin, "sin", "float32", 2), cos.shape(1),
                            interleaved};
    if (sin.shape(0) != cos.shape(0) || sin.shape(1) != cos.shape(1)) throw nb::value_error("cos and sin differ in shape");
    return {rotation, cos.shape(0), cos, sin};
}

using MaybeArray = std::optional<Array>;

inline Scoring scoring_of(float scale, float softcap, std::int64_t window, const MaybeArray& slopes, const MaybeArray& sinks,
                          std::size_t n_heads) {
    if (window < 0) throw nb::value_error("window must not be negative");
    return {scale, softcap, window ? std::size_t(window) : no_window, row_of(slopes, "slopes", n_heads), row_of(sinks, "sinks", n_heads)};
}

// A norm and the arrays that hold it.
struct NormHandle {
    Norm norm;
    Array weight;
    MaybeArray bias;
};

inline NormHandle new_norm(const Array& weight, const MaybeArray& bias, float eps, bool centred) {
    if (weight.ndim() != 1 && weight.ndim() != 2) throw nb::value_error("a norm's weight must be [width] or [rows, width]");
    const float* values = elements<float>(weight, "weight", "float32", weight.ndim());
    const std::size_t n_rows = weight.ndim() == 2 ? weight.shape(0) : 1, width = weight.shape(weight.ndim() - 1);
    if (n_rows * width == 0) throw nb::value_error("a norm's weight holds nothing");
    const float* shifts = bias ? elements<float>(*bias, "bias", "float32", weight.ndim()) : nullptr;
    if (bias && (bias->size() != weight.size() || bias->shape(0) != weight.shape(0)))
        throw nb::value_error("a norm's weight and bias differ in shape");
    return {{values, shifts, width, n_rows, eps, centred}, weight, bias};
}

// A matrix, what its product is multiplied with and shifted by, and the arrays that hold it.
struct LinearHandle {
    LinearHandle(const Weights& given, float scale, const MaybeArray& given_bias) : weights(given), bias(given_bias) {
        shift = row_of(bias, "bias", weights.matrix.n_out), factor = scale;
    }

    // Points into this.
    Linear linear() const { return {&weights.matrix, shift, factor}; }

    Weights weights;
    MaybeArray bias;
    const float* shift;
    float factor;
};

using MaybeLinear = std::optional<LinearHandle>;
using MaybeNorm = std::optional<NormHandle>;

inline Activation activation_of(const std::string& name, const std::vector<float>& numbers) {
    static const char* const names[] = {"silu", "gelu", "gelu_tanh", "relu", "relu_squared", "swiglu_clamped", "xielu"};
    for (std::size_t i = 0; i < std::size(names); ++i) {
        if (name != names[i]) continue;
        if (numbers.size() != (ActivationKind(i) == ActivationKind::xielu ? 4u : 0u)) throw nb::value_error(("other numbers than those of " + name).c_str());
        Activation made{ActivationKind(i), 0, 0, 0, 0};
        if (!numbers.empty()) made.alpha_n = numbers[0], made.alpha_p = numbers[1], made.beta = numbers[2], made.eps = numbers[3];
        return made;
    }
    throw nb::value_error(("no kernel for the activation '" + name + "'").c_str());
}

// A layer with all that it points to.
class LayerHandle {
public:
    LayerHandle(std::vector<MaybeLinear> linears, std::vector<MaybeNorm> norms, const Activation& activation, std::size_t head_dim,
                float scale, float softcap, std::int64_t window, const MaybeArray& slopes, const MaybeArray& sinks, float limit,
                float residual_scale, bool parallel, std::optional<float> threshold)
        : linears_(std::move(linears)), norms_(std::move(norms)), slopes_(slopes), sinks_(sinks), head_dim_(head_dim) {
        if (linears_.size() != 9 || norms_.size() != 8) throw nb::value_error("a layer has nine linears and eight norms, or none in place");
        if (!linears_[0] || !linears_[3] || (linears_[2] && !linears_[1])) throw nb::value_error("a layer without q, output, or the k of its v");
        if (linears_[5].has_value() != linears_[6].has_value() || (linears_[4] && !linears_[5]))
            throw nb::value_error("a feed-forward layer without up, or down");
        if (linears_[7].has_value() != linears_[8].has_value()) throw nb::value_error("a learned residual without left, or right");
        const std::size_t width = linears_[0]->weights.matrix.n_in, n_q = linears_[0]->weights.matrix.n_out;
        const std::size_t n_kv = linears_[1] ? linears_[1]->weights.matrix.n_out : head_dim;
        const std::size_t n_ff = linears_[5] ? linears_[5]->weights.matrix.n_out : 0;
        if (!head_dim || n_q % head_dim || n_kv % head_dim || !n_kv || n_q % n_kv)
            throw nb::value_error("q and k are no heads of this width, or those of q no multiple of those of k");
        if (activation.kind == ActivationKind::swiglu_clamped && n_ff && !linears_[4]) throw nb::value_error("swiglu_clamped without a gate");
        if (threshold && n_ff && !linears_[4]) throw nb::value_error("a threshold without a gate");
        layer_.q = linear(0, n_q, width, "q"), layer_.k = linear(1, n_kv, width, "k"), layer_.v = linear(2, n_kv, width, "v");
        layer_.output = linear(3, width, n_q, "output");
        layer_.gating.gate = linear(4, n_ff, width, "gate"), layer_.gating.up = linear(5, n_ff, width, "up"), layer_.down = linear(6, width, n_ff, "down");
        const std::size_t n_low = linears_[7] ? linears_[7]->weights.matrix.n_out : 0;
        layer_.left = linear(7, n_low, width, "left"), layer_.right = linear(8, width, n_low, "right"), layer_.right_norm = norm(7, width, "right_norm");
        layer_.attn_norm = norm(0, width, "attn_norm"), layer_.attn_post_norm = norm(4, width, "attn_post_norm");
        layer_.ffn_norm = norm(5, width, "ffn_norm"), layer_.ffn_post_norm = norm(6, width, "ffn_post_norm");
        layer_.q_norm = heads_norm(1, n_q, "q_norm"), layer_.k_norm = heads_norm(2, n_kv, "k_norm"), layer_.v_norm = heads_norm(3, n_kv, "v_norm");
        layer_.scoring = scoring_of(scale, softcap, window, slopes_, sinks_, n_q / head_dim);
        layer_.gating.activation = activation, layer_.gating.threshold = threshold, layer_.limit = limit, layer_.residual_scale = residual_scale, layer_.parallel = parallel;
    }
    LayerHandle(const LayerHandle&) = delete;
    LayerHandle& operator=(const LayerHandle&) = delete;

    // The layer, for a batch of so many tokens on these kernels, this cache and these angles.
    const Layer& checked(const IsaKernels& kernels, std::size_t width, std::size_t n_tokens, const Batch& batch, const KvLayer& cache,
                         const Angles& angles) const {
        for (const MaybeLinear& linear : linears_)
            if (linear && linear->weights.kernels != &kernels) throw nb::value_error("the weights are another instruction set's");
        if (width != layer_.q.matrix->n_in)
            throw nb::value_error(("x has rows of " + std::to_string(width) + ", the layer takes " +
                                   std::to_string(layer_.q.matrix->n_in)).c_str());
        const std::size_t n_kv = cache.n_kv_heads * head_dim_;
        if (cache.head_dim != head_dim_ || (layer_.k.matrix ? n_kv != layer_.k.matrix->n_out : layer_.q.matrix->n_out % n_kv != 0))
            throw nb::value_error("the cache has other heads than the layer");
        if (batch.n_tokens() != n_tokens || batch.n_pages() > cache.n_pages)
            throw nb::value_error("tokens that x, or a page that the cache, does not have");
        if (angles.n_tokens != n_tokens || 2 * angles.rotation.half > head_dim_)
            throw nb::value_error("cos and sin are not [tokens, at most half a head]");
        return layer_;
    }

private:
    Linear linear(std::size_t i, std::size_t n_out, std::size_t n_in, const char* name) const {
        if (!linears_[i]) return {nullptr, nullptr};
        const Matrix& m = linears_[i]->weights.matrix;
        if (m.n_out != n_out || m.n_in != n_in)
            throw nb::value_error((std::string(name) + " is [" + std::to_string(m.n_out) + ", " + std::to_string(m.n_in) + "], not [" +
                                   std::to_string(n_out) + ", " + std::to_string(n_in) + "]").c_str());
        return linears_[i]->linear();
    }

    Norm norm(std::size_t i, std::size_t width, const char* name) const {
        if (!norms_[i]) return {};
        const Norm& found = norms_[i]->norm;
        if (found.width != width || found.n_rows != 1)
            throw nb::value_error((std::string(name) + " has not the width " + std::to_string(width)).c_str());
        return found;
    }

    Norm heads_norm(std::size_t i, std::size_t n, const char* name) const {
        if (!norms_[i]) return {};
        const Norm& found = norms_[i]->norm;
        const bool by_head = found.width == head_dim_ && (found.n_rows == 1 || found.n_rows * head_dim_ == n);
        if (!by_head && (found.width != n || found.n_rows != 1))
            throw nb::value_error((std::string(name) + " covers neither a head, nor each of them, nor all as one").c_str());
        return found;
    }

    std::vector<MaybeLinear> linears_;
    std::vector<MaybeNorm> norms_;
    MaybeArray slopes_, sinks_;
    Layer layer_{};
    std::size_t head_dim_;
};

}  // namespace slm::python
