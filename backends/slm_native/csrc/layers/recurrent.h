// Layers with a state, shared among threads. Shapes: B sequences of T tokens each, E embedding width, D channels of a
// state, N numbers of each, W taps; rows are those of the B * T tokens, sequence by sequence.
#pragma once

#include <cstddef>

#include "matmul/products.h"

namespace slm {

void selective_scan(const IsaKernels& kernels, Pool& pool, const Scan& scan);

void convolve(const IsaKernels& kernels, Pool& pool, const Convolution& convolution);

struct Sequences {
    std::size_t n_sequences, n_tokens;  // tokens of each
    std::size_t n_rows() const { return n_sequences * n_tokens; }
};

// What a layer with a convolution and a state space remembers: before a batch, and after it.
struct MambaStates {
    const float *window, *state;  // [B][W - 1][channels of the convolution], [B][D][N]
    float *window_after, *state_after;
};

// Mamba between its input and its output matrix; see Mamba in slm_native/kernels/recurrent.py.
struct Mamba {
    std::size_t n_inner, n_state, n_taps, n_rank;
    const float *taps, *conv_bias;   // [W][D], [D] or null
    const Matrix *select, *steps;    // (R + 2N, D), (D, R)
    Norm norms[3];                   // of the step sizes [R], b [N] and c [N]
    const float *step_bias, *a, *d;  // [D] or null, [D][N], [D]
};

// y [B * T][D] of projected [B * T][2D].
void mamba(const IsaKernels& kernels, Pool& pool, const Mamba& layer, Sequences batch, const float* projected,
           const MambaStates& states, float* y);

// Mamba 2 between its input and its output matrix.
struct Mamba2 {
    std::size_t n_inner, n_state, n_taps, n_heads, n_groups;
    const float *taps, *conv_bias;   // [W][D + 2GN], [D + 2GN] or null
    const float *step_bias, *a, *d;  // [H] of each
    Norm norm;                       // [G][D / G]
};

// y [B * T][D] of projected [B * T][2D + 2GN + H].
void mamba2(const IsaKernels& kernels, Pool& pool, const Mamba2& layer, Sequences batch, const float* projected,
            const MambaStates& states, float* y);

// A layer from its norm to its output matrix: a gated convolution with taps [W][E], or one of the others, in place of it.
struct StateLayer {
    Norm norm;
    Linear project;
    const Mamba* mamba;
    const Mamba2* mamba2;
    const float* taps;
    std::size_t n_taps;
    Linear output;
};

// y = residual + scale * what the layer makes of x, all [B * T][E]; of a convolution there is no state but the window.
void run_layer(const IsaKernels& kernels, Pool& pool, const StateLayer& layer, Sequences batch,
               const MambaStates& states, float scale, const float* x, const float* residual, float* y);

// y [B * T][E] of projected [B * T][3E]: the last third of it and the first, multiplied, convolved, and times the second.
void gated_convolution(const IsaKernels& kernels, Pool& pool, const float* taps, std::size_t n_taps, std::size_t width,
                       Sequences batch, const float* projected, const MambaStates& states, float* y);

// Two matrices, one after another.
struct LowRank {
    const Matrix *down, *up;  // (rank, E), (E, rank)
};

// RWKV-7's time mixing up to its output matrix; see Rwkv7 in slm_native/kernels/rwkv.py.
struct TimeMix {
    const float* shares;  // [6][E], for receptance, decay, key, value, rate and gate
    const Matrix *receptance, *key, *value;
    LowRank decay, rate, gate, first_value;  // the last null in the model's first layer
    DeltaRule rule;                          // its weights and sizes, states and y; what products give is found here
};

// `value` [B * T][E] is what later layers mix in, where this is the first.
void time_mix(const IsaKernels& kernels, Pool& pool, const TimeMix& layer, Sequences batch, const float* x,
              const float* last, float* value);

// RWKV-7's channel mixing: y [B * T][E] of x [B * T][E] and the tokens before, last [B][E].
struct ChannelMix {
    const float* share;       // [E]
    const Matrix *up, *down;  // (F, E), (E, F)
};

// What it makes is added to `residual` [B * T][E], where there is one.
void channel_mix(const IsaKernels& kernels, Pool& pool, const ChannelMix& layer, Sequences batch, const float* x,
                 const float* last, const float* residual, float* y);

// A block of RWKV-7: both mixings, each behind a norm; what they make is added to what entered.
struct RwkvBlock {
    Norm time_norm;
    TimeMix time;
    Linear output;
    Norm channel_norm;
    ChannelMix channel;
};

// What a block remembers: before a batch, and after it.
struct RwkvStates {
    const float *last, *state, *channel_last;  // [B][E], [B][H][P][P], [B][E]
    float *last_after, *state_after, *channel_last_after;
};

// A block on x [B * T][E], in place; `values` [B * T][E] are made by the model's first block and read by others.
void rwkv_block(const IsaKernels& kernels, Pool& pool, const RwkvBlock& block, Sequences batch,
                const RwkvStates& states, float* values, float* x);

}  // namespace slm
