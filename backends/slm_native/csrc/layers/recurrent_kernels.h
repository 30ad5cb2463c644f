// The interface between recurrent.cpp, which divides work among threads, and the kernels of an instruction set. Only
// plain data and declarations: all instruction sets include this.
#pragma once

#include <cstddef>

namespace slm {

// Rows of tokens [n_sequences * n_tokens], `stride` numbers apart.
struct TokenRows {
    const float* at;
    std::size_t stride;
};

// See RecurrentOps.selective_scan in slm_native/kernels/recurrent.py. With d and z, y = (y + d * x) * silu(z).
struct Scan {
    std::size_t n_sequences, n_tokens, n_heads, width, n_groups, n_state, n_rates;
    TokenRows x, steps, b, c, z;     // z.at may be null
    const float *step_bias, *a, *d;  // [H] or null, [H][n_rates], [H] or null
    const float* before;             // [B][H][P][N]
    float *after, *y;                // [B][H][P][N], [B * T][H * P]
};

// A causal convolution of each channel of x, or of x * x_gate; then silu, or a product with y_gate.
struct Convolution {
    std::size_t n_sequences, n_tokens, width, n_taps;
    TokenRows x, x_gate, y_gate;        // the gates may be null
    const float *taps, *bias, *before;  // [n_taps][width], [width] or null, [B][n_taps - 1][width]
    bool silu;
    float *after, *y;  // as `before`; [B * T][width]
};

// A row of x, or of the window before it, and the row of x_gate.
struct TappedRow { const float *x, *gate; };

// Token shift: x + (previous token - x) * share.
struct Shift {
    std::size_t n_tokens, width;      // tokens of a sequence
    const float *x, *before, *share;  // [B * T][width], [B][width], [width]
};

// The delta rule of RWKV-7's time mixing; see `time_mix` in slm_native/kernels/rwkv.py.
struct DeltaRule {
    std::size_t n_sequences, n_tokens, n_heads, width;
    const float *r, *k, *v, *decay, *rate, *gate;      // [B * T][H * P]
    const float *value_share, *first_value;            // [B * T][H * P]; null in the first layer
    const float *decay_base, *rate_base, *value_base;  // [H * P]
    const float *key_removed, *key_rate, *bonus, *norm_weight, *norm_bias;
    const float* unit;  // [P], the norm weights of the removal key
    float slowest, unit_eps, norm_eps;
    const float* before;  // [B][H][P][P]
    float *after, *y;
};

enum class Curve { sigmoid, tanh, relu_squared };

struct ScanKernels {
    // Scans all tokens of heads begin .. end - 1 of a sequence; `work` holds scan_floats.
    void (*heads)(const Scan& scan, std::size_t sequence, std::size_t begin, std::size_t end, float* work);
    // Convolves all tokens of channels begin .. end - 1 of a sequence; `rows` holds n_taps.
    void (*convolve)(const Convolution& convolution, std::size_t sequence, std::size_t begin, std::size_t end,
                     TappedRow* rows);
    // Shifts token t of the batch, to a row [width].
    void (*shift)(const Shift& shift, std::size_t t, float* to);
    // Applies the delta rule to all tokens of one head of a sequence; `work` holds delta_floats.
    void (*delta)(const DeltaRule& rule, std::size_t sequence, std::size_t head, float* work);
    void (*curve)(Curve curve, float* x, std::size_t n);
};

// Internal linkage: each file has its own copy, compiled for its own instruction set.
static constexpr std::size_t most_lanes = 16;
static inline std::size_t in_vectors(std::size_t n) { return (n + most_lanes - 1) / most_lanes * most_lanes; }
// Work memory in floats for n_heads heads: input rows, then states and rates. Each group or row is padded to whole
// vectors, and the last vector may extend beyond its group.
static inline std::size_t scan_floats(const Scan& s, std::size_t n_heads) {
    const std::size_t n_rows = n_heads * s.width, n_groups = n_heads < s.n_groups ? n_heads : s.n_groups;
    return 5 * in_vectors(n_rows + most_lanes) + 2 * in_vectors(n_heads + most_lanes) +
           2 * (n_rows + n_groups * most_lanes + 1) * in_vectors(s.n_state);
}
static inline std::size_t delta_floats(const DeltaRule& rule) { return (rule.width + 9) * in_vectors(rule.width); }

}  // namespace slm
