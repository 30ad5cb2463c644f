// A KV cache of arbitrary bytes, as after the restore of a dump: few and many queries attend to it.
#include <algorithm>
#include <numeric>

#include "attention/attention.h"
#include "input.h"
#include "matmul/products.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const slm::IsaKernels& kernels = slm::kernels_of(fuzz::isa_of(input));
    const auto type = slm::KvType(input.below(slm::n_kv_types));
    const std::size_t head_dim = 32 * (1 + input.below(4)), n_kv_heads = 1 + input.below(3), group = 1 + input.below(3);
    const std::size_t n_held = 1 + input.below(140), n_queries = 1 + input.below(std::min<std::size_t>(n_held, 6));
    const std::size_t n_pages = (n_held + slm::page_tokens - 1) / slm::page_tokens, n_heads = n_kv_heads * group;
    const slm::Scoring scoring{0.2f, input.below(2) ? 30.0f : 0.0f, input.below(2) ? 50 : slm::no_window, nullptr,
                               nullptr};

    std::size_t bytes[slm::most_planes], page_bytes = 0;
    slm::token_bytes(type, head_dim, bytes);
    for (std::size_t plane : bytes) page_bytes += 2 * n_kv_heads * slm::page_tokens * plane;
    const auto pages = input.bytes(n_pages * page_bytes);
    const slm::KvLayer layer =
        slm::layer_of(pages.get(), n_pages, page_bytes, type, type, false, {1, 0, n_kv_heads, head_dim});

    std::vector<std::int32_t> tokens(n_queries), order(n_pages);
    std::iota(tokens.begin(), tokens.end(), 0);
    std::iota(order.rbegin(), order.rend(), 0);
    const std::vector<float> q = fuzz::activations(n_queries * n_heads * head_dim);
    std::vector<float> out(q.size()), key(head_dim);
    const auto pool = slm::Pool::shared(1);
    slm::read(kernels, layer, order.data(), n_held - 1, n_kv_heads - 1, key.data());
    slm::attend(kernels, *pool, layer, {{tokens.data(), order.data(), n_queries, n_held}}, scoring, n_heads, q.data(),
                out.data());
    return 0;
}
