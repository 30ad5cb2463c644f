// Products of activations with matrices of weights, shared among threads.
#pragma once

#include <cstddef>
#include <span>

#include "multiply.h"

namespace slm {

const IsaKernels& kernels_of(Isa isa);  // an available one

// One product of several that have their activations in common.
struct Product {
    const Matrix* matrix;
    float* y;  // [n_tokens][n_out]
};

// Weights of a root mean square norm; none where `weight` is null.
struct Norm {
    const float* weight;
    float eps;
};

// y = x @ matrix.T for each product; x is [n_tokens][n_in].
void multiply(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, std::span<const Product> products);

// The same with x normalized first.
void project(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, Norm norm, std::span<const Product> products);

// y = silu(gate) * up, both products of x, normalized first; y is [n_tokens][n_out].
void gate_up(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, Norm norm, const Matrix& gate,
             const Matrix& up, float* y);

// y = residual + x @ matrix.T, both [n_tokens][n_out].
void add_product(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, const Matrix& matrix,
                 const float* residual, float* y);

// How heads are turned to their positions; not at all where `half` is 0.
struct Rotation {
    const float *cos, *sin;  // [n_tokens][half]
    std::size_t half;
    bool interleaved;
};

// y = heads x [n_tokens][n_heads][width], each normalized, then rotated; y may be x.
void turn_heads(const IsaKernels& kernels, Pool& pool, const float* x, std::size_t n_tokens, std::size_t n_heads,
                std::size_t width, Norm norm, Rotation rotation, float* y);

}  // namespace slm
