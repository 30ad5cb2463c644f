#include "matmul/embedding.h"

#include <algorithm>

namespace slm {

namespace {

constexpr std::size_t least_part = 1 << 13;  // weights; for fewer, waking a thread costs more than it saves

}  // namespace

void embed_row(const Matrix& matrix, std::size_t row, float* y) {
    if (matrix.format) matrix.format->dequantize(rows_of(matrix), row, matrix.n_in, y);
    else matrix.floats->expand(matrix.data + row * matrix.row_bytes, matrix.n_in, y);
}

void embed(Pool& pool, const Matrix& matrix, std::span<const std::int32_t> rows, float* y) {
    const std::size_t step = std::max<std::size_t>(1, least_part / matrix.n_in);
    pool.run((rows.size() + step - 1) / step, [&](std::size_t part) {
        for (std::size_t i = part * step; i < std::min(rows.size(), (part + 1) * step); ++i)
            embed_row(matrix, std::size_t(rows[i]), y + i * matrix.n_in);
    });
}

}  // namespace slm
