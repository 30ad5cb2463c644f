// Layers with a state: what crosses between sharing them among threads and computing them. Plain data and declarations
// only: included by all instruction sets.
#pragma once

#include <cstddef>

namespace slm {

// Numbers of tokens [n_sequences * n_tokens], one token's `stride` after those of the token before.
struct TokenRows {
    const float* at;
    std::size_t stride;
};

// See KernelSet.selective_scan in slm_native/kernels/kernelset.py; then y = (y + d * x) * silu(z), where those are given.
struct Scan {
    std::size_t n_sequences, n_tokens, n_heads, width, n_groups, n_state, n_rates;
    TokenRows x, steps, b, c, z;     // z.at may be null
    const float *step_bias, *a, *d;  // [H] or null, [H][n_rates], [H] or null
    const float* before;             // [B][H][P][N]
    float *after, *y;                // [B][H][P][N], [B * T][H * P]
};

// Each channel's weighted sum of its last values: of x, or of x * x_gate; then silu of it, or times y_gate.
struct Convolution {
    std::size_t n_sequences, n_tokens, width, n_taps;
    TokenRows x, x_gate, y_gate;        // the gates may be null
    const float *taps, *bias, *before;  // [n_taps][width], [width] or null, [B][n_taps - 1][width]
    bool silu;
    float *after, *y;  // as `before`; [B * T][width]
};

// A row of x, or what came before it, and of x_gate.
struct TappedRow { const float *x, *gate; };

// Of each token and the one before it a mixture: x + (before - x) * share.
struct Shift {
    std::size_t n_tokens, width;      // tokens of a sequence
    const float *x, *before, *share;  // [B * T][width], [B][width], [width]
};

// RWKV-7's time mixing from its products on: see `time_mix` in slm_native/kernels/rwkv.py.
struct DeltaRule {
    std::size_t n_sequences, n_tokens, n_heads, width;
    const float *r, *k, *v, *decay, *rate, *gate;      // [B * T][H * P]
    const float *value_share, *first_value;            // the same, or null: the first layer mixes no other's values in
    const float *decay_base, *rate_base, *value_base;  // [H * P]
    const float *key_removed, *key_rate, *bonus, *norm_weight, *norm_bias;
    const float* unit;  // [P], the weights of the norm of what is taken out of the state
    float slowest, unit_eps, norm_eps;
    const float* before;  // [B][H][P][P]
    float *after, *y;
};

enum class Curve { sigmoid, tanh, relu_squared };

struct ScanKernels {
    // Heads from begin to end of a sequence, all of its tokens; `work` holds `scan_room`.
    void (*heads)(const Scan& scan, std::size_t sequence, std::size_t begin, std::size_t end, float* work);
    // Channels from begin to end of a sequence, all of its tokens; `rows` holds n_taps.
    void (*convolve)(const Convolution& convolution, std::size_t sequence, std::size_t begin, std::size_t end,
                     TappedRow* rows);
    // Token t of the batch, to a row [width].
    void (*shift)(const Shift& shift, std::size_t t, float* to);
    // One head of a sequence, all of its tokens; `work` holds `delta_room`.
    void (*delta)(const DeltaRule& rule, std::size_t sequence, std::size_t head, float* work);
    void (*curve)(Curve curve, float* x, std::size_t n);
};

// Internal linkage: each file that includes this keeps a copy that is compiled for its own instruction set.
static constexpr std::size_t most_lanes = 16;
static inline std::size_t in_vectors(std::size_t n) { return (n + most_lanes - 1) / most_lanes * most_lanes; }
// Floats of memory that so many heads take: rows of numbers, then states and rates, each group's or row's in whole vectors,
// and what a vector of the last group reaches beyond it.
static inline std::size_t scan_room(const Scan& s, std::size_t n_heads) {
    const std::size_t n_rows = n_heads * s.width, n_groups = n_heads < s.n_groups ? n_heads : s.n_groups;
    return 5 * in_vectors(n_rows + most_lanes) + 2 * in_vectors(n_heads + most_lanes) +
           2 * (n_rows + n_groups * most_lanes + 1) * in_vectors(s.n_state);
}
static inline std::size_t delta_room(const DeltaRule& rule) { return (rule.width + 9) * in_vectors(rule.width); }

}  // namespace slm
