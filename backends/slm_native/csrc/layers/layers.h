// Whole layers of a transformer, one after another without a word to Python.
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

// Attention and a feed-forward layer, one after the other or side by side; see PlainBlock in
// slm_native/kernels/parameters.py. What has no matrix or no weights is not there: of k, another layer's keys and values
// are read; of v, keys are values, too; of q, it attends to latents; of gating.up, a mixture is in its place, or the layer
// ends after its attention.
struct Layer {
    Norm attn_norm;
    Linear q, k, v;
    float limit;                  // of what these make, either way; 0 for none
    Norm q_norm, k_norm, v_norm;  // of a head, or of all heads of a token as one
    Latent latent;
    Linear output;
    Scoring scoring;
    Norm attn_post_norm;
    Linear left, right;  // a residual that is learned: a projection of low rank of what the attention reads
    Norm right_norm, ffn_norm;
    GateUp gating;
    Linear down;
    const Mixture* mixture;  // or null
    Norm ffn_post_norm;
    float residual_scale;
    bool parallel;  // the feed-forward layer reads what the attention reads
    AltUp altup;
    LayerEmbedding embedding;
    float output_scale;  // of what leaves the layer
};

// Streams x [n_streams][n_tokens][E] through all layers, in place; those with several have all AltUp. Of the last layer, what
// follows attention is done for tokens `wanted` alone, in rising order, whose rows then begin x, [n_streams][wanted][E];
// for all where it is null.
void run_layers(const IsaKernels& kernels, Pool& pool, std::span<const Layer> layers, std::span<const Place> places,
                const Tokens& tokens, const std::vector<std::int64_t>* wanted, std::size_t n_streams, float* x);

}  // namespace slm
