// Weights of arbitrary bytes in every format: embedding rows, and products with few and many rows of activations.
#include <numeric>

#include "matmul/embedding.h"
#include "input.h"
#include "matmul/products.h"

namespace {

slm::Matrix matrix_of(const slm::IsaKernels& kernels, fuzz::Input& input) {
    slm::Matrix m{nullptr, nullptr, nullptr, 0, 0, 0};
    const std::size_t kind = input.below(kernels.n_formats + kernels.n_floats);
    m.n_out = 1 + input.below(20);
    const std::size_t n_blocks = 1 + input.below(5);
    if (kind < kernels.n_formats) {
        m.format = &kernels.formats[kind];
        m.n_in = n_blocks * std::size_t(m.format->block);
        m.row_bytes = n_blocks * m.format->block_bytes;
    } else {
        m.floats = &kernels.floats[kind - kernels.n_formats];
        m.n_in = n_blocks * 32;
        m.row_bytes = m.n_in * m.floats->bytes;
    }
    return m;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const slm::IsaKernels& kernels = slm::kernels_of(fuzz::isa_of(input));
    slm::Matrix matrix = matrix_of(kernels, input);
    const std::size_t n_tokens = 1 + input.below(20);
    const auto weights = input.bytes(matrix.n_out * matrix.row_bytes);
    matrix.data = weights.get();
    const auto pool = slm::Pool::shared(1);
    std::vector<std::int32_t> rows(matrix.n_out);
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<float> looked_up(matrix.n_out * matrix.n_in), y(n_tokens * matrix.n_out);
    slm::embed(*pool, matrix, rows, looked_up.data());
    const std::vector<float> x = fuzz::activations(n_tokens * matrix.n_in);
    const slm::Product product{&matrix, y.data()};
    slm::multiply(kernels, *pool, x.data(), n_tokens, {&product, 1});
    return 0;
}
