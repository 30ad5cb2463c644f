// Products, norms and activations, with work divided among threads.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "matmul/multiply.h"

namespace slm {

const IsaKernels& kernels_of(Isa isa);  // `isa` must be available

// One of several products with the same activations.
struct Product {
    const Matrix* matrix;
    float* y;  // [n_tokens][n_out]
};

// The change that an adapter makes of a matrix (LoRA): x @ a.T @ b.
struct Lora {
    const Matrix* a;         // [r][n_in], or null without a change
    const std::uint16_t* b;  // float16 [ceil(n_out / lora_columns)][r][lora_columns]; the last block may be narrower
};

constexpr std::size_t lora_columns = 256;

// y = scale * (x @ matrix.T) + bias + the change; absent if `matrix` is null.
struct Linear {
    const Matrix* matrix;
    const float* bias;  // [n_out] or null
    float scale = 1.0f;
    Lora lora = {};
};

// One of several linears with the same activations, and its output.
struct Projection {
    const Linear* linear;
    float* y;  // [n_tokens][n_out]
};

// y = x @ matrix.T for each product; x is [n_tokens][n_in].
void multiply(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens,
              std::span<const Product> products);

// y = normalize(x), n values; n is a multiple of norm.width * norm.n_rows. y may be x.
void normalize(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n, const Norm& norm, float* y);

// Applies each linear to x, after a norm of whole rows.
void project(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Norm& norm,
             std::span<const Projection> projections);

// Applies scale and bias of a linear to its product y [n_rows][n_out].
void finish(const Linear& linear, float* y, std::size_t n_rows);

// The gate and up projections of a feed-forward layer.
struct GateUp {
    Linear gate, up;  // `gate` may be absent
    Activation activation;
    std::optional<float> threshold;  // with `gate` only: gaussian top-k, in standard deviations above a row's mean
};

// y = activation(gate(x)) * up(x) [n_tokens][n_out], x after its norm; without a gate, activation(up(x)).
void gate_up(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Norm& norm,
             const GateUp& gating, float* y);

// y = activation(gate) * up of n values; without up, activation(gate). y may be gate.
void activate(const IsaKernels& kernels, Pool& pool, const float* gate, const float* up, std::size_t n,
              const Activation& activation, float* y);

// y[t] = x[t] + the sum of parts[j][t] * shares[t * stride + j], all [n_tokens][width].
void add_shares(const IsaKernels& kernels, Pool& pool, const float* x, std::span<const float* const> parts,
                const float* shares, std::size_t stride, std::size_t n_tokens, std::size_t width, float* y);

// y = residual + linear(x), both [n_tokens][n_out].
void add_product(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Linear& linear,
                 const float* residual, float* y);

// y = residual + scale * normalize(linear(x)).
void add_normed(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Linear& linear,
                const Norm& norm, float scale, const float* residual, float* y);

// Rotary position embedding of a batch; absent if `half` is 0.
struct Rotation {
    const float *cos, *sin;  // [n_tokens][half]
    std::size_t half;
    bool interleaved;
};

// y = heads x [n_tokens][n_heads][width] after a norm (per head, or over all heads of a token) and RoPE. y may be x.
void rotate_heads(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, std::size_t n_heads,
                  std::size_t width, const Norm& norm, Rotation rotation, float* y);

}  // namespace slm
