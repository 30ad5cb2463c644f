// Rows of a matrix as floats, shared among threads.
#pragma once

#include <cstdint>
#include <span>

#include "matmul/multiply.h"

namespace slm {

// y [rows][n_in], the weights of the matrix's rows, each of which it has.
void embed(Pool& pool, const Matrix& matrix, std::span<const std::int32_t> rows, float* y);

// y [n_in], those of one row.
void embed_row(const Matrix& matrix, std::size_t row, float* y);

}  // namespace slm
