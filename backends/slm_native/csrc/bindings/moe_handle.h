// The handle of an MoE layer; it keeps the arrays that it points into alive.
#pragma once

#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "layers/moe.h"
#include "bindings/handles.h"

namespace slm::python {

inline Gating gating_of(const std::string& name) {
    static const char* const names[] = {"softmax", "sigmoid", "softmax_of_chosen", "sparse_mixer"};
    for (std::size_t i = 0; i < std::size(names); ++i)
        if (name == names[i]) return Gating(i);
    fail("no gating '", name, "'");
}

// Routing options. MoeHandle adds the selection bias and keeps its array.
inline RoutingOptions new_routing(const std::string& gating, std::size_t n_experts, std::size_t n_used, bool normalized,
                                  float scale, std::size_t n_groups, std::size_t n_groups_used) {
    require(n_groups && n_groups_used && n_groups_used <= n_groups && n_experts % n_groups == 0,
            "n_groups must divide the number of experts, and be at least n_groups_used, which must be at least 1");
    require(n_used && n_used <= n_experts / n_groups * n_groups_used,
            "n_used must be from 1 to the number of experts in the used groups");
    return {n_experts, n_used, n_groups, n_groups_used, gating_of(gating), normalized, scale, nullptr};
}

// An MoE layer and the arrays that hold its weights.
class MoeHandle {
public:
    MoeHandle(const LinearHandle& router, const MaybeArray& bias, const RoutingOptions& routing,
              std::vector<LinearHandle> gates, std::vector<LinearHandle> ups, std::vector<LinearHandle> downs,
              const Activation& activation, bool scales_input, std::vector<MaybeLinear> shared,
              const MaybeLinear& shared_gate)
        : router_(router), bias_(bias), gates_(std::move(gates)), ups_(std::move(ups)), downs_(std::move(downs)),
          shared_(std::move(shared)), shared_gate_(shared_gate) {
        const std::size_t n_experts = routing.n_experts, width = router_.weights.matrix.n_in;
        require(
            ups_.size() == n_experts && downs_.size() == n_experts && (gates_.empty() || gates_.size() == n_experts),
            "gates, ups and downs need one matrix per expert");
        check_gate(activation, !gates_.empty());
        const std::size_t n_ff = ups_[0].weights.matrix.n_out;
        moe_ = {checked(router_, n_experts, width, "router"), routing, {}, activation, scales_input, {}, {}};
        moe_.routing.bias = row_of(bias_, "selection_bias", n_experts);
        for (std::size_t i = 0; i < n_experts; ++i)
            moe_.experts.push_back({gates_.empty() ? Linear{} : checked(gates_[i], n_ff, width, "gate"),
                                    checked(ups_[i], n_ff, width, "up"), checked(downs_[i], width, n_ff, "down")});
        if (!shared_.empty()) moe_.shared = checked_shared(activation, width);
        if (shared_gate_) moe_.shared_gate = checked(*shared_gate_, 1, width, "shared_gate");
    }
    MoeHandle(const MoeHandle&) = delete;
    MoeHandle& operator=(const MoeHandle&) = delete;

    const MoeLayer& moe() const { return moe_; }

    // The layer, after checking its instruction set.
    const MoeLayer& checked_for(const IsaKernels& kernels) const {
        require(router_.weights.kernels == &kernels, other_kernels);
        return moe_;
    }

private:
    static void check_gate(const Activation& activation, bool has_gate) {
        require(activation.kind != ActivationKind::swiglu_clamped || has_gate, "swiglu_clamped without a gate");
    }

    Linear checked(const LinearHandle& linear, std::size_t n_out, std::size_t n_in, const char* name) const {
        const Matrix& m = linear.weights.matrix;
        require(linear.weights.kernels == router_.weights.kernels, "the weights are of several instruction sets");
        require(m.n_out == n_out && m.n_in == n_in, name, " is [", m.n_out, ", ", m.n_in, "], not [", n_out, ", ", n_in,
                "]");
        return linear.linear();
    }

    FeedForward checked_shared(const Activation& activation, std::size_t width) const {
        require(shared_.size() == 3 && shared_[1] && shared_[2], "a shared expert is a gate or None, up and down");
        check_gate(activation, shared_[0].has_value());
        const std::size_t n_ff = shared_[1]->weights.matrix.n_out;
        const Linear gate = shared_[0] ? checked(*shared_[0], n_ff, width, "gate") : Linear{};
        return {gate, checked(*shared_[1], n_ff, width, "up"), checked(*shared_[2], width, n_ff, "down")};
    }

    LinearHandle router_;
    MaybeArray bias_;
    std::vector<LinearHandle> gates_, ups_, downs_;
    std::vector<MaybeLinear> shared_;
    MaybeLinear shared_gate_;
    MoeLayer moe_{};
};

}  // namespace slm::python
