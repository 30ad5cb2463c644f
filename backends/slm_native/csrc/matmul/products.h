// Products of activations with matrices of weights, shared among threads.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "matmul/multiply.h"

namespace slm {

const IsaKernels& kernels_of(Isa isa);  // an available one

// One product of several that have their activations in common.
struct Product {
    const Matrix* matrix;
    float* y;  // [n_tokens][n_out]
};

// A matrix, and what its product is multiplied with and shifted by then; none where `matrix` is null.
struct Linear {
    const Matrix* matrix;
    const float* bias;  // [n_out] or null
    float scale = 1.0f;
};

// What one linear of several that have their activations in common makes.
struct Made {
    const Linear* linear;
    float* y;  // [n_tokens][n_out]
};

// y = x @ matrix.T for each product; x is [n_tokens][n_in].
void multiply(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens,
              std::span<const Product> products);

// y = n values x, normalized; n is a multiple of what the norm has weights for, and y may be x.
void normalize(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n, const Norm& norm, float* y);

// What each linear makes of x, normalized first by a norm of whole rows.
void project(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Norm& norm,
             std::span<const Made> made);

// What is left of a linear after its product, rows y [n_rows][n_out].
void finish(const Linear& linear, float* y, std::size_t n_rows);

// What makes the inner values of a feed-forward layer.
struct GateUp {
    Linear gate, up;  // gate may be none
    Activation activation;
    std::optional<float>
        threshold;  // of a row of gates (there must be one), so many deviations above the mean: what is above it remains
};

// y = activation(gate) * up, both made of x, normalized first; without a gate, activation(up). y is [n_tokens][n_out].
void gate_up(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Norm& norm,
             const GateUp& gating, float* y);

// y = activation(gate) * up of n values; without up, activation(gate). y may be gate.
void activate(const IsaKernels& kernels, Pool& pool, const float* gate, const float* up, std::size_t n,
              const Activation& activation, float* y);

// y[t] = x[t] + the sum of parts[j][t] * shares[t * stride + j], all [n_tokens][width].
void add_shares(const IsaKernels& kernels, Pool& pool, const float* x, std::span<const float* const> parts,
                const float* shares, std::size_t stride, std::size_t n_tokens, std::size_t width, float* y);

// y = residual + what the linear makes of x, both [n_tokens][n_out].
void add_product(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Linear& linear,
                 const float* residual, float* y);

// y = residual + scale * normalized(what the linear makes of x).
void add_normed(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Linear& linear,
                const Norm& norm, float scale, const float* residual, float* y);

// How heads are turned to their positions; not at all where `half` is 0.
struct Rotation {
    const float *cos, *sin;  // [n_tokens][half]
    std::size_t half;
    bool interleaved;
};

// y = heads x [n_tokens][n_heads][width], each (or all of a token as one) normalized, then rotated; y may be x.
void turn_heads(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, std::size_t n_heads,
                std::size_t width, const Norm& norm, Rotation rotation, float* y);

}  // namespace slm
