// Runs transformer layers one after another, without returning to Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "layers/moe.h"
#include "attention/latent.h"
#include "layers/altup.h"
#include "attention/tokens.h"

namespace slm {

// A transformer layer; slm_native/kernels/cpu/fusion.py makes it from steps. A null matrix or null weights mean that
// the layer lacks this part. Without k, attention reads the keys and values of another layer; without v, keys are also
// the values; without q, the layer is MLA (`latent`); without gating.up, the feed-forward layer is MoE (`moe`), or the
// layer ends after attention.
struct Layer {
    Norm attn_norm;
    Linear q, k, v;
    float limit;                  // q, k and v are clamped to -limit .. limit; 0 for none
    Norm q_norm, k_norm, v_norm;  // per head, or over all heads of a token
    Latent latent;
    Linear output;
    Scoring scoring;
    Norm attn_post_norm;
    Linear left, right;  // LAuReL: a low-rank learned residual of attention's input
    Norm right_norm, ffn_norm;
    GateUp gating;
    Linear down;
    const MoeLayer* moe;  // or null
    Norm ffn_post_norm;
    float residual_scale;
    bool parallel;  // whether attention and feed-forward layer read the same input
    AltUp altup;
    LayerEmbedding embedding;
    float output_scale;  // multiplies the output of the layer
};

// Runs all layers on the residual streams x [n_streams][n_tokens][E], in place; with several streams, all layers have
// AltUp. After the last attention, only `output_tokens` (ascending indices; null for all) are computed: they become the
// first rows of x, [n_streams][output_tokens][E].
void run_layers(const IsaKernels& kernels, Pool& pool, std::span<const Layer> layers,
                std::span<const LayerInputs> inputs, const Tokens& tokens,
                const std::vector<std::int64_t>* output_tokens, std::size_t n_streams, float* x);

}  // namespace slm
