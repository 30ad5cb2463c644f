// Routing with arbitrary scores, which may be infinite, NaN or equal: it selects distinct existing experts.
#include <cstdlib>
#include <cstring>

#include "input.h"
#include "layers/routing.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    slm::RoutingOptions routing{};
    routing.n_groups = 1 + input.below(4);
    routing.n_experts = routing.n_groups * (1 + input.below(9));
    routing.n_groups_used = 1 + input.below(routing.n_groups);
    routing.n_used = 1 + input.below(routing.n_groups_used * (routing.n_experts / routing.n_groups));
    routing.gating = slm::Gating(input.below(4));
    routing.normalized = input.below(2), routing.scale = 1.5f;
    const auto bytes = input.bytes(2 * routing.n_experts * sizeof(float));
    std::vector<float> numbers(2 * routing.n_experts);
    std::memcpy(numbers.data(), bytes.get(), numbers.size() * sizeof(float));
    routing.bias = input.below(2) ? numbers.data() + routing.n_experts : nullptr;
    std::vector<slm::ExpertWeight> chosen(routing.n_used);
    slm::route(routing, numbers.data(), chosen.data());
    std::vector<bool> is_used(routing.n_experts);
    for (const slm::ExpertWeight& one : chosen) {
        if (one.expert >= routing.n_experts || is_used[one.expert]) std::abort();  // no such expert, or selected twice
        is_used[one.expert] = true;
    }
    return 0;
}
