// Products of activations with weight matrices, several at once, with work divided among threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels.h"
#include "pool.h"

namespace slm {

// A weight matrix in the layout of the model file. Exactly one of `format` and `floats` is set.
struct Matrix {
    const FormatKernels* format;
    const FloatKernels* floats;
    const std::uint8_t* data;
    std::size_t n_out, n_in, row_bytes;
};

Rows rows_of(const Matrix& matrix);  // of quantized weights

// A reusable buffer, aligned to cache lines, that grows on demand.
class Scratch {
public:
    // A buffer of n values; previous contents are lost.
    template <class T>
    T* buffer(std::size_t n) {
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

// Computes rows of activations on demand, without storing all of them.
class RowSource {
public:
    virtual void make(std::size_t i, float* to) const = 0;

protected:
    ~RowSource() = default;
};

// y = x @ matrix.T. Products with the same rows of activations share their quantized or packed form.
struct Multiplication {
    const Matrix* matrix;
    const float* x;  // [n_rows][n_in]; with `which`, [any number][n_in]
    std::size_t n_rows;
    float* y;                                // [n_rows][n_out]
    const std::uint32_t* which = nullptr;    // [n_rows]
    std::size_t x_stride = 0, y_stride = 0;  // from row to row; 0 for contiguous rows
    const RowSource* source = nullptr;       // computes the rows, in place of x and which

    const float* row(std::size_t i) const { return x + (which ? which[i] : i) * (x_stride ? x_stride : matrix->n_in); }
    bool follow_each_other() const { return !which && !x_stride && !source; }  // whether rows of x are contiguous
    std::size_t to_next() const { return y_stride ? y_stride : matrix->n_out; }
};

// Computes all products. Threads synchronize twice in total: after quantizing activations, and at the end.
void multiply_all(const IsaKernels& kernels, Pool& pool, std::span<const Multiplication> products);

// Rows t * n + i, `stride` numbers apart.
struct HeadRows {
    const float* at;
    std::size_t stride;
};

// Multiplies row t * n + i of x [n_tokens * n][n_in] by matrix i of n; all matrices have one shape. y is
// [n_tokens * n][n_out], with rows `y_stride` numbers apart.
void multiply_per_head(const IsaKernels& kernels, Pool& pool, const HeadRows& x, std::size_t n_tokens,
                       std::span<const Matrix* const> matrices, float* y, std::size_t y_stride);

}  // namespace slm
