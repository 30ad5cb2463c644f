// Products of activations with matrices of weights, several at once, shared among threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels.h"
#include "pool.h"

namespace slm {

// A matrix of weights as it lies in the file. Exactly one of `format` and `floats` is set.
struct Matrix {
    const FormatKernels* format;
    const FloatKernels* floats;
    const std::uint8_t* data;
    std::size_t n_out, n_in, row_bytes;
};

Rows rows_of(const Matrix& matrix);  // of quantized weights

// Memory of a cache line's alignment that grows and is used again.
class Scratch {
public:
    // Room for n values; what it held is lost.
    template <class T>
    T* room(std::size_t n) {
        return static_cast<T*>(bytes(n * sizeof(T)));
    }
    ~Scratch();
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

private:
    void* bytes(std::size_t n);

    void* memory_ = nullptr;
    std::size_t size_ = 0;
};

// Makes rows of activations that lie nowhere, each where it is wanted.
class RowSource {
public:
    virtual void make(std::size_t i, float* to) const = 0;

protected:
    ~RowSource() = default;
};

// One product of several: y = x @ matrix.T. Those that have rows of activations in common share what is made of them.
struct Multiplication {
    const Matrix* matrix;
    const float* x;  // [n_rows][n_in]; or [any number][n_in] of which `which` are read
    std::size_t n_rows;
    float* y;                                // [n_rows][n_out]
    const std::uint32_t* which = nullptr;    // [n_rows]
    std::size_t x_stride = 0, y_stride = 0;  // from row to row, where rows do not follow each other
    const RowSource* source = nullptr;       // of the rows, in the place of x and which

    const float* row(std::size_t i) const { return x + (which ? which[i] : i) * (x_stride ? x_stride : matrix->n_in); }
    bool follow_each_other() const { return !which && !x_stride && !source; }  // rows of x
    std::size_t to_next() const { return y_stride ? y_stride : matrix->n_out; }
};

// All products: threads meet once when activations are rounded, and once at the end, however many products there are.
void multiply_all(const IsaKernels& kernels, Pool& pool, std::span<const Multiplication> products);

// Rows t * n + i of so many, `stride` numbers apart.
struct HeadRows {
    const float* at;
    std::size_t stride;
};

// Row t * n + i of x [n_tokens * n][n_in] times matrix i of n, all of one shape: y [n_tokens * n][n_out], `y_stride` numbers apart.
void multiply_by_head(const IsaKernels& kernels, Pool& pool, const HeadRows& x, std::size_t n_tokens,
                      std::span<const Matrix* const> matrices, float* y, std::size_t y_stride);

}  // namespace slm
