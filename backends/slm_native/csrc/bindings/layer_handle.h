// Handles of transformer layers and their parts.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/handles.h"
#include "layers/layers.h"
#include "bindings/moe_handle.h"

namespace slm::python {

inline Linear linear_of(const MaybeLinear& handle, std::size_t n_out, std::size_t n_in, const char* name) {
    if (!handle) return {nullptr, nullptr};
    const Matrix& m = handle->weights.matrix;
    require(m.n_out == n_out && m.n_in == n_in, name, " is [", m.n_out, ", ", m.n_in, "], not [", n_out, ", ", n_in,
            "]");
    return handle->linear();
}

inline Norm norm_of(const MaybeNorm& handle, std::size_t width, const char* name) {
    if (!handle) return {};
    require(handle->norm.width == width && handle->norm.n_rows == 1, name, " must have the width ", width);
    return handle->norm;
}

// The matrices of MLA and the arrays that hold them.
class LatentHandle {
public:
    LatentHandle(const MaybeLinear& q_down, const MaybeNorm& q_norm, const LinearHandle& q, const LinearHandle& kv_down,
                 const MaybeNorm& kv_norm, std::vector<Weights> k_up, std::vector<Weights> v_up)
        : q_down_(q_down), q_(q), kv_down_(kv_down), q_norm_(q_norm), kv_norm_(kv_norm), k_up_(std::move(k_up)),
          v_up_(std::move(v_up)) {
        require(!k_up_.empty() && k_up_.size() == v_up_.size(), "k_up and v_up need one matrix per head");
        const auto alike = [](const std::vector<Weights>& all, std::size_t n_in) {
            return std::all_of(all.begin(), all.end(), [&](const Weights& w) {
                return w.matrix.n_in == n_in && w.matrix.n_out == all[0].matrix.n_out;
            });
        };
        require(alike(k_up_, k_up_[0].matrix.n_in) && alike(v_up_, rank()),
                "k_up or v_up have matrices of different shapes, or of another latent");
        require(head_dim() > rank(), "kv_down must be wider than the latent");
        require(!q_norm_ || q_down_, "q_norm without q_down");
        latent();  // throws if shapes do not fit
    }

    std::size_t width() const { return kv_down_->weights.matrix.n_in; }
    std::size_t head_dim() const { return kv_down_->weights.matrix.n_out; }
    std::size_t n_heads() const { return k_up_.size(); }
    std::size_t n_results() const { return n_heads() * v_up_[0].matrix.n_out; }

    bool is_of(const IsaKernels& kernels) const {
        const auto is_of = [&](const Weights& w) { return w.kernels == &kernels; };
        return std::all_of(k_up_.begin(), k_up_.end(), is_of) && std::all_of(v_up_.begin(), v_up_.end(), is_of) &&
               is_of(q_->weights) && is_of(kv_down_->weights) && (!q_down_ || is_of(q_down_->weights));
    }

    // Points into this.
    Latent latent() {
        const std::size_t n_q = n_heads() * (k_up_[0].matrix.n_in + head_dim() - rank());
        const std::size_t n_low = q_down_ ? q_down_->weights.matrix.n_out : width();
        k_matrices_.clear(), v_matrices_.clear();
        for (const Weights& w : k_up_) k_matrices_.push_back(&w.matrix);
        for (const Weights& w : v_up_) v_matrices_.push_back(&w.matrix);
        return {linear_of(q_down_, n_low, width(), "q_down"),
                norm_of(q_norm_, n_low, "q_norm"),
                linear_of(q_, n_q, n_low, "q"),
                kv_down_->linear(),
                norm_of(kv_norm_, rank(), "kv_norm"),
                k_matrices_,
                v_matrices_};
    }

private:
    std::size_t rank() const { return k_up_[0].matrix.n_out; }

    MaybeLinear q_down_, q_, kv_down_;
    MaybeNorm q_norm_, kv_norm_;
    std::vector<Weights> k_up_, v_up_;
    std::vector<const Matrix*> k_matrices_, v_matrices_;
};

// How a layer adds its per-layer embedding, and the arrays that hold the weights.
class EmbeddingHandle {
public:
    EmbeddingHandle(const LinearHandle& gate, const LinearHandle& project, const MaybeNorm& norm)
        : gate_(gate), project_(project), norm_(norm) {}

    bool is_of(const IsaKernels& kernels) const {
        return gate_->weights.kernels == &kernels && project_->weights.kernels == &kernels;
    }
    std::size_t n_low() const { return gate_->weights.matrix.n_out; }

    // Points into this. `width` is the width of the layer.
    LayerEmbedding embedding(std::size_t width, const Activation& activation) const {
        return {linear_of(gate_, n_low(), width, "the embedding's gate"),
                linear_of(project_, width, n_low(), "the embedding's project"),
                norm_of(norm_, width, "the embedding's norm"), activation};
    }

private:
    MaybeLinear gate_, project_;
    MaybeNorm norm_;
};

// AltUp of a layer, and the arrays that hold the weights.
class AltUpHandle {
public:
    AltUpHandle(const LinearHandle& router, const NormHandle& router_norm, const LinearHandle& predict,
                const LinearHandle& correct, const Array& scale, std::size_t active)
        : router_(router), predict_(predict), correct_(correct), router_norm_(router_norm), scale_(scale),
          active_(active) {
        require(active < n_streams(), "the active stream is out of range");
    }

    bool is_of(const IsaKernels& kernels) const {
        const auto is_of = [&](const MaybeLinear& linear) { return linear->weights.kernels == &kernels; };
        return is_of(router_) && is_of(predict_) && is_of(correct_);
    }
    std::size_t n_streams() const { return router_->weights.matrix.n_out; }

    // Points into this. `width` is the width of the layer.
    AltUp altup(std::size_t width) const {
        const std::size_t n = n_streams();
        return {linear_of(router_, n, width, "router"), linear_of(predict_, n * n, n, "predict"),
                linear_of(correct_, n, n, "correct"),   norm_of(router_norm_, width, "router_norm"),
                row_of(scale_, "scale", width),         active_};
    }

private:
    MaybeLinear router_, predict_, correct_;
    MaybeNorm router_norm_;
    MaybeArray scale_;
    std::size_t active_;
};

// Optional parts of a layer.
struct LayerExtras {
    std::optional<LatentHandle> latent;
    const MoeHandle* moe = nullptr;  // the caller keeps it alive
    std::optional<AltUpHandle> altup;
    std::optional<EmbeddingHandle> embedding;
    float output_scale = 1.0f;
};

// A layer and the arrays that hold its weights.
class LayerHandle {
public:
    LayerHandle(std::vector<MaybeLinear> linears, std::vector<MaybeNorm> norms, const Activation& activation,
                std::size_t head_dim, float scale, float softcap, std::int64_t window, const MaybeArray& slopes,
                const MaybeArray& sinks, float limit, float residual_scale, bool parallel,
                std::optional<float> threshold, const LayerExtras& extras)
        : linears_(std::move(linears)), norms_(std::move(norms)), slopes_(slopes), sinks_(sinks),
          latent_(extras.latent), altup_(extras.altup), embedding_(extras.embedding), head_dim_(head_dim) {
        require(linears_.size() == 9 && norms_.size() == 8,
                "a layer takes nine linears and eight norms, each of them or None");
        require(linears_[0].has_value() != latent_.has_value() && linears_[3] && (!linears_[2] || linears_[1]),
                "a layer needs q, output, and k if it has v");
        require(!latent_ || (!linears_[1] && !norms_[1] && !norms_[2] && !norms_[3] && limit == 0),
                "latent attention takes no k, per-head norms or limit");
        require(linears_[5].has_value() == linears_[6].has_value() && (!linears_[4] || linears_[5]),
                "a feed-forward layer needs up and down");
        require(linears_[7].has_value() == linears_[8].has_value(), "a learned residual needs left and right");
        const std::size_t width = latent_ ? latent_->width() : linears_[0]->weights.matrix.n_in;
        const std::size_t n_q = latent_ ? latent_->n_heads() * head_dim : linears_[0]->weights.matrix.n_out;
        const std::size_t n_kv = linears_[1] ? linears_[1]->weights.matrix.n_out : head_dim;
        const std::size_t n_ff = linears_[5] ? linears_[5]->weights.matrix.n_out : 0;
        require(head_dim && n_q % head_dim == 0 && n_kv % head_dim == 0 && n_kv && n_q % n_kv == 0,
                "q and k must consist of heads of head_dim, and the heads of q must be a multiple of those of k");
        require(!latent_ || head_dim == latent_->head_dim(), "head_dim is not the width of the latent's keys");
        require(activation.kind != ActivationKind::swiglu_clamped || !n_ff || linears_[4],
                "swiglu_clamped without a gate");
        require(!threshold || !n_ff || linears_[4], "a threshold without a gate");
        layer_.q = linear(0, n_q, width, "q"), layer_.k = linear(1, n_kv, width, "k"),
        layer_.v = linear(2, n_kv, width, "v");
        layer_.output = linear(3, width, latent_ ? latent_->n_results() : n_q, "output");
        if (latent_) layer_.latent = latent_->latent();
        layer_.gating.gate = linear(4, n_ff, width, "gate"), layer_.gating.up = linear(5, n_ff, width, "up"),
        layer_.down = linear(6, width, n_ff, "down");
        const std::size_t n_low = linears_[7] ? linears_[7]->weights.matrix.n_out : 0;
        layer_.left = linear(7, n_low, width, "left"), layer_.right = linear(8, width, n_low, "right"),
        layer_.right_norm = norm(7, width, "right_norm");
        layer_.attn_norm = norm(0, width, "attn_norm"), layer_.attn_post_norm = norm(4, width, "attn_post_norm");
        layer_.ffn_norm = norm(5, width, "ffn_norm"), layer_.ffn_post_norm = norm(6, width, "ffn_post_norm");
        layer_.q_norm = heads_norm(1, n_q, "q_norm"), layer_.k_norm = heads_norm(2, n_kv, "k_norm"),
        layer_.v_norm = heads_norm(3, n_kv, "v_norm");
        n_q_ = n_q;
        add(extras, width, activation);
        layer_.scoring = scoring_of(scale, softcap, window, slopes_, sinks_, n_q / head_dim);
        layer_.gating.activation = activation, layer_.gating.threshold = threshold, layer_.limit = limit,
        layer_.residual_scale = residual_scale, layer_.parallel = parallel;
    }
    LayerHandle(const LayerHandle&) = delete;
    LayerHandle& operator=(const LayerHandle&) = delete;

    // The layer, after checking that it fits the kernels, the batch, the cache and the angles.
    const Layer& checked(const IsaKernels& kernels, std::size_t width, const Batch& batch, const KvLayer& cache,
                         const Angles& angles) const {
        for (const MaybeLinear& linear : linears_)
            require(!linear || linear->weights.kernels == &kernels, other_kernels);
        const auto is_of = [&](const auto& part) { return !part || part->is_of(kernels); };
        require(is_of(latent_) && is_of(altup_) && is_of(embedding_), other_kernels);
        const std::size_t n_in = layer_.output.matrix->n_out;
        require(width == n_in, "x has rows of ", width, ", the layer takes ", n_in);
        const std::size_t n_kv = cache.n_kv_heads * head_dim_;
        const bool fits_kv = layer_.k.matrix ? n_kv == layer_.k.matrix->n_out : n_q_ % n_kv == 0;
        require(cache.head_dim == head_dim_ && fits_kv && (!latent_ || cache.n_kv_heads == 1),
                "the heads of the cache and of the layer differ");
        require(batch.n_pages() <= cache.n_pages, "a page is out of range");
        require(angles.n_tokens == batch.n_tokens() && 2 * angles.rotation.half <= head_dim_,
                "cos and sin must be [tokens, at most head_dim / 2]");
        if (layer_.moe) moe_->checked_for(kernels);
        return layer_;
    }

    // The number of residual streams, and the width of the per-layer embedding (0 without).
    std::size_t n_streams() const { return altup_ ? altup_->n_streams() : 1; }
    std::size_t n_embedding() const { return embedding_ ? embedding_->n_low() : 0; }

private:
    void add(const LayerExtras& extras, std::size_t width, const Activation& activation) {
        moe_ = extras.moe;
        if (moe_) layer_.moe = &moe_->moe();
        require(!moe_ || (!linears_[5] && layer_.moe->router.matrix->n_in == width),
                "experts of another width, or with a feed-forward layer");
        require(!altup_ || (embedding_ && extras.output_scale == 1.0f), "streams need embeddings, and take no scale");
        if (altup_) layer_.altup = altup_->altup(width);
        if (embedding_) layer_.embedding = embedding_->embedding(width, activation);
        layer_.output_scale = extras.output_scale;
    }

    Linear linear(std::size_t i, std::size_t n_out, std::size_t n_in, const char* name) const {
        return linear_of(linears_[i], n_out, n_in, name);
    }
    Norm norm(std::size_t i, std::size_t width, const char* name) const { return norm_of(norms_[i], width, name); }

    Norm heads_norm(std::size_t i, std::size_t n, const char* name) const {
        if (!norms_[i]) return {};
        const Norm& head_norm = norms_[i]->norm;
        const bool per_head =
            head_norm.width == head_dim_ && (head_norm.n_rows == 1 || head_norm.n_rows * head_dim_ == n);
        require(per_head || (head_norm.width == n && head_norm.n_rows == 1), name,
                " must have the width of one head, [heads, head_dim], or the width of all heads");
        return head_norm;
    }

    std::vector<MaybeLinear> linears_;
    std::vector<MaybeNorm> norms_;
    MaybeArray slopes_, sinks_;
    std::optional<LatentHandle> latent_;
    std::optional<AltUpHandle> altup_;
    std::optional<EmbeddingHandle> embedding_;
    const MoeHandle* moe_ = nullptr;
    Layer layer_{};
    std::size_t head_dim_, n_q_;
};

}  // namespace slm::python
