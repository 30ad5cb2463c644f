// Embedding lookup, with work divided among threads.
#pragma once

#include <cstdint>
#include <span>

#include "matmul/multiply.h"

namespace slm {

// y [rows][n_in] = dequantized rows of the matrix; all row indices must be valid.
void embed(Pool& pool, const Matrix& matrix, std::span<const std::int32_t> rows, float* y);

// y [n_in] = one dequantized row.
void embed_row(const Matrix& matrix, std::size_t row, float* y);

}  // namespace slm
