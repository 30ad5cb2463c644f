// Handles that Python holds; each keeps the arrays that it points into alive.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bindings/arrays.h"
#include "attention/attention.h"
#include "isa.h"
#include "matmul/products.h"

namespace slm::python {

inline Isa find_isa(const std::string& name) {
    for (Isa isa : all_isas)
        if (name_of(isa) == name && is_available(isa)) return isa;
    fail("instruction set '", name, "' is not available here");
}

inline constexpr const char* other_kernels = "the weights were prepared for another instruction set";

// A weight matrix and the array that holds it.
struct Weights {
    Matrix matrix;
    const IsaKernels* kernels;
    Array owner;
};

inline KvType find_kv_type(const std::string& name) {
    static const char* const names[n_kv_types] = {"f32", "f16", "bf16", "q8_0", "q6_0", "q5_0", "q4_0"};
    for (std::size_t i = 0; i < n_kv_types; ++i)
        if (name == names[i]) return KvType(i);
    fail("no kernel for KV type '", name, "'");
}

using Pages = nb::ndarray<std::uint8_t, nb::device::cpu>;

// Keys and values of one layer and the array that holds them.
struct CacheLayer {
    KvLayer layer;
    Pages owner;
};

inline CacheLayer new_cache_layer(const Pages& pages, const std::string& keys, const std::string& values,
                                  std::size_t n_layers, std::size_t layer, std::size_t n_kv_heads,
                                  std::size_t head_dim) {
    require(pages.ndim() == 2 && is_contiguous(Array(pages)), "pages must be C-contiguous [n_pages, page_bytes]");
    const bool in_keys = values.empty();  // the values are the keys
    const KvType key_type = find_kv_type(keys), value_type = in_keys ? key_type : find_kv_type(values);
    const KvLayout place{n_layers, layer, n_kv_heads, head_dim};
    return {layer_of(pages.data(), pages.shape(0), pages.shape(1), key_type, value_type, in_keys, place), pages};
}

// The sequences of a batch: their tokens and their pages.
class Batch {
public:
    Batch(const Array& tokens, const Array& pages, const Array& n_tokens, const Array& n_held,
          const Array& bidirectional)
        : tokens_(copy(tokens, "tokens")), pages_(copy(pages, "pages")), n_batch_(tokens_.size()) {
        const auto* counts = elements<std::int32_t>(n_tokens, "n_tokens", "int32", 1);
        const auto* lengths = elements<std::int32_t>(n_held, "n_held", "int32", 1);
        const auto* is_block = elements<std::int32_t>(bidirectional, "bidirectional", "int32", 1);
        require(n_tokens.size() == n_held.size() && n_tokens.size() == bidirectional.size(),
                "n_tokens, n_held and bidirectional differ in length");
        for (std::int32_t token : tokens_)
            require(token >= 0 && std::size_t(token) < n_batch_, "a token index is out of range");
        for (std::int32_t page : pages_) {
            require(page >= 0, "a page index is negative");
            n_pages_ = std::max(n_pages_, std::size_t(page) + 1);
        }
        std::size_t token = 0, page = 0;
        for (std::size_t i = 0; i < n_tokens.size(); ++i) {
            require(counts[i] >= 1 && lengths[i] >= counts[i],
                    "a run is empty, or holds fewer tokens than the batch adds");
            runs_.push_back({tokens_.data() + token, pages_.data() + page, std::size_t(counts[i]),
                             std::size_t(lengths[i]), is_block[i] != 0});
            token += std::size_t(counts[i]), page += (std::size_t(lengths[i]) + page_tokens - 1) / page_tokens;
        }
        require(token == n_batch_ && page == pages_.size(), "the runs do not use all tokens and pages exactly once");
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

// Rotation angles of a batch (RoPE).
struct Angles {
    Rotation rotation;
    std::size_t n_tokens;
    Array cos, sin;
};

inline Angles new_angles(const Array& cos, const Array& sin, bool interleaved) {
    const Rotation rotation{elements<float>(cos, "cos", "float32", 2), elements<float>(sin, "sin", "float32", 2),
                            cos.shape(1), interleaved};
    require(sin.shape(0) == cos.shape(0) && sin.shape(1) == cos.shape(1), "cos and sin differ in shape");
    return {rotation, cos.shape(0), cos, sin};
}

using MaybeArray = std::optional<Array>;

inline Scoring scoring_of(float scale, float softcap, std::int64_t window, const MaybeArray& slopes,
                          const MaybeArray& sinks, std::size_t n_heads) {
    require(window >= 0, "window must not be negative");
    return {scale, softcap, window ? std::size_t(window) : no_window, row_of(slopes, "slopes", n_heads),
            row_of(sinks, "sinks", n_heads)};
}

// A norm and the arrays that hold it.
struct NormHandle {
    Norm norm;
    Array weight;
    MaybeArray bias;
};

inline NormHandle new_norm(const Array& weight, const MaybeArray& bias, float eps, bool centred) {
    require(weight.ndim() == 1 || weight.ndim() == 2, "a norm's weight must be [width] or [rows, width]");
    const float* values = elements<float>(weight, "weight", "float32", weight.ndim());
    const std::size_t n_rows = weight.ndim() == 2 ? weight.shape(0) : 1, width = weight.shape(weight.ndim() - 1);
    require(n_rows * width != 0, "a norm's weight is empty");
    const float* shifts = bias ? elements<float>(*bias, "bias", "float32", weight.ndim()) : nullptr;
    require(!bias || (bias->size() == weight.size() && bias->shape(0) == weight.shape(0)),
            "a norm's weight and bias differ in shape");
    return {{values, shifts, width, n_rows, eps, centred}, weight, bias};
}

// A Linear and the arrays that hold it.
struct LinearHandle {
    LinearHandle(const Weights& matrix, float scale, const MaybeArray& bias_array, const std::optional<Weights>& lora_a,
                 const MaybeArray& lora_b)
        : weights(matrix), bias(bias_array), change(lora_a), columns(lora_b) {
        shift = row_of(bias, "bias", weights.matrix.n_out), factor = scale;
        require(change.has_value() == columns.has_value(), "an adapter needs a and b");
        if (!change) return;
        require(change->kernels == weights.kernels, other_kernels);
        require(change->matrix.n_in == weights.matrix.n_in && change->matrix.n_out != 0, "a does not fit the matrix");
        halves = elements<std::uint16_t>(*columns, "b", "uint16", 1);
        require(columns->size() == change->matrix.n_out * weights.matrix.n_out, "b does not fit a and the matrix");
    }

    // Points into this.
    Linear linear() const {
        const Lora lora = change ? Lora{&change->matrix, halves} : Lora{};
        return {&weights.matrix, shift, factor, lora};
    }

    Weights weights;
    MaybeArray bias;
    std::optional<Weights> change;
    MaybeArray columns;
    const float* shift;
    const std::uint16_t* halves = nullptr;
    float factor;
};

using MaybeLinear = std::optional<LinearHandle>;
using MaybeNorm = std::optional<NormHandle>;

inline Activation activation_of(const std::string& name, const std::vector<float>& numbers) {
    static const char* const names[] = {"silu", "gelu", "gelu_tanh", "relu", "relu_squared", "swiglu_clamped", "xielu"};
    for (std::size_t i = 0; i < std::size(names); ++i) {
        if (name != names[i]) continue;
        require(numbers.size() == (ActivationKind(i) == ActivationKind::xielu ? 4u : 0u),
                "wrong number of parameters of the activation ", name);
        Activation activation{ActivationKind(i), 0, 0, 0, 0};
        if (!numbers.empty())
            activation.alpha_n = numbers[0], activation.alpha_p = numbers[1], activation.beta = numbers[2],
            activation.eps = numbers[3];
        return activation;
    }
    fail("no kernel for the activation '", name, "'");
}

}  // namespace slm::python
