// Experts are chosen by any numbers: infinite ones, none, and equals among them.
#include <cstdlib>
#include <cstring>

#include "input.h"
#include "layers/routing.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    slm::Choice choice{};
    choice.n_groups = 1 + input.below(4);
    choice.n_experts = choice.n_groups * (1 + input.below(9));
    choice.n_groups_used = 1 + input.below(choice.n_groups);
    choice.n_used = 1 + input.below(choice.n_groups_used * (choice.n_experts / choice.n_groups));
    choice.gating = slm::Gating(input.below(4));
    choice.normalized = input.below(2), choice.scale = 1.5f;
    const auto bytes = input.bytes(2 * choice.n_experts * sizeof(float));
    std::vector<float> numbers(2 * choice.n_experts);
    std::memcpy(numbers.data(), bytes.get(), numbers.size() * sizeof(float));
    choice.bias = input.below(2) ? numbers.data() + choice.n_experts : nullptr;
    std::vector<slm::Chosen> chosen(choice.n_used);
    slm::choose(choice, numbers.data(), chosen.data());
    std::vector<bool> is_used(choice.n_experts);
    for (const slm::Chosen& one : chosen) {
        if (one.expert >= choice.n_experts || is_used[one.expert]) std::abort();  // no expert, or one twice
        is_used[one.expert] = true;
    }
    return 0;
}
