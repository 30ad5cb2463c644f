// Recurrent layers (Mamba, Mamba 2, gated convolution, RWKV-7), with work divided among threads. Shapes: B sequences of
// T tokens each, E embedding width, D channels, N state values per channel, W taps. Rows are tokens, sequence by
// sequence.
#pragma once

#include <cstddef>

#include "matmul/products.h"

namespace slm {

void selective_scan(const IsaKernels& kernels, Pool& pool, const Scan& scan);

void convolve(const IsaKernels& kernels, Pool& pool, const Convolution& convolution);

struct Sequences {
    std::size_t n_sequences, n_tokens;  // n_tokens: of each sequence
    std::size_t n_rows() const { return n_sequences * n_tokens; }
};

// The convolution window and the SSM state, before and after the batch.
struct MambaStates {
    const float *window, *state;  // [B][W - 1][channels of the convolution], [B][D][N]
    float *window_after, *state_after;
};

// Mamba between its input and output matrices; see Mamba in slm_native/kernels/recurrent.py.
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

// Mamba 2 between its input and output matrices.
struct Mamba2 {
    std::size_t n_inner, n_state, n_taps, n_heads, n_groups;
    const float *taps, *conv_bias;   // [W][D + 2GN], [D + 2GN] or null
    const float *step_bias, *a, *d;  // [H] of each
    Norm norm;                       // [G][D / G]
};

// y [B * T][D] of projected [B * T][2D + 2GN + H].
void mamba2(const IsaKernels& kernels, Pool& pool, const Mamba2& layer, Sequences batch, const float* projected,
            const MambaStates& states, float* y);

// A layer from its norm to its output matrix. Between its projections it has Mamba, Mamba 2, or a gated convolution
// with taps [W][E].
struct RecurrentLayer {
    Norm norm;
    Linear project;
    const Mamba* mamba;
    const Mamba2* mamba2;
    const float* taps;
    std::size_t n_taps;
    Linear output;
};

// y = residual + scale * layer(x), all [B * T][E]. The only state of a gated convolution is its window.
void run_layer(const IsaKernels& kernels, Pool& pool, const RecurrentLayer& layer, Sequences batch,
               const MambaStates& states, float scale, const float* x, const float* residual, float* y);

// y [B * T][E] = c * convolution(b * x) of projected [B * T][b | c | x].
void gated_convolution(const IsaKernels& kernels, Pool& pool, const float* taps, std::size_t n_taps, std::size_t width,
                       Sequences batch, const float* projected, const MambaStates& states, float* y);

// A low-rank product: down, then up.
struct LowRank {
    const Matrix *down, *up;  // (rank, E), (E, rank)
};

// RWKV-7's time mixing up to its output matrix; see Rwkv7 in slm_native/kernels/rwkv.py.
struct TimeMix {
    const float* shares;  // [6][E], for receptance, decay, key, value, rate and gate
    const Matrix *receptance, *key, *value;
    LowRank decay, rate, gate, first_value;  // first_value is null in the model's first layer
    DeltaRule rule;                          // its weights, sizes, states and y; time_mix sets the products
};

// Writes `value` [B * T][E]; later layers mix in the first layer's values.
void time_mix(const IsaKernels& kernels, Pool& pool, const TimeMix& layer, Sequences batch, const float* x,
              const float* last, float* value);

// RWKV-7's channel mixing: y [B * T][E] from x [B * T][E]; last [B][E] are the tokens before x.
struct ChannelMix {
    const float* share;       // [E]
    const Matrix *up, *down;  // (F, E), (E, F)
};

// Adds `residual` [B * T][E] unless it is null.
void channel_mix(const IsaKernels& kernels, Pool& pool, const ChannelMix& layer, Sequences batch, const float* x,
                 const float* last, const float* residual, float* y);

// A block of RWKV-7: time mixing and channel mixing, each with its norm and residual.
struct RwkvBlock {
    Norm time_norm;
    TimeMix time;
    Linear output;
    Norm channel_norm;
    ChannelMix channel;
};

// The state of a block, before and after the batch.
struct RwkvStates {
    const float *last, *state, *channel_last;  // [B][E], [B][H][P][P], [B][E]
    float *last_after, *state_after, *channel_last_after;
};

// Runs a block on x [B * T][E] in place. The model's first block writes `values` [B * T][E]; the others read them.
void rwkv_block(const IsaKernels& kernels, Pool& pool, const RwkvBlock& block, Sequences batch,
                const RwkvStates& states, float* values, float* x);

}  // namespace slm
