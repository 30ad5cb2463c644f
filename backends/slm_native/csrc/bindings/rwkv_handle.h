// Handles of RWKV-7's blocks.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "bindings/handles.h"
#include "layers/recurrent.h"

namespace slm::python {

inline void check_matrix(const Matrix& m, std::size_t n_out, std::size_t n_in) {
    require(m.n_out == n_out && m.n_in == n_in, "a matrix is [", m.n_out, ", ", m.n_in, "], not [", n_out, ", ", n_in,
            "]");
}

inline bool are_of(const std::vector<Weights>& all, const IsaKernels& kernels) {
    return std::all_of(all.begin(), all.end(), [&](const Weights& w) { return w.kernels == &kernels; });
}

// Time mixing and the arrays that hold its weights.
class TimeMixHandle {
public:
    TimeMixHandle(const Array& shares, std::vector<Weights> matrices, std::vector<Array> rows, const Array& unit,
                  float unit_eps, float norm_eps, float slowest)
        : matrices_(std::move(matrices)), rows_(std::move(rows)), shares_(shares), unit_(unit) {
        require((matrices_.size() == 9 && rows_.size() == 7) || (matrices_.size() == 11 && rows_.size() == 8),
                "matrices or rows are missing, or too many");
        const Matrix** to[] = {&layer_.receptance,       &layer_.key,           &layer_.value,
                               &layer_.decay.down,       &layer_.decay.up,      &layer_.rate.down,
                               &layer_.rate.up,          &layer_.gate.down,     &layer_.gate.up,
                               &layer_.first_value.down, &layer_.first_value.up};
        for (std::size_t i = 0; i < matrices_.size(); ++i) *to[i] = &matrices_[i].matrix;
        DeltaRule& rule = layer_.rule;
        const float** vectors[] = {&rule.decay_base, &rule.rate_base,   &rule.key_removed, &rule.key_rate,
                                   &rule.bonus,      &rule.norm_weight, &rule.norm_bias,   &rule.value_base};
        for (std::size_t i = 0; i < rows_.size(); ++i) *vectors[i] = row_of(rows_[i], "rows", width());
        rule.unit = elements<float>(unit, "unit", "float32", 1), rule.width = unit.size();
        require(rule.width != 0 && width() % rule.width == 0, "heads of unit do not fill a row");
        rule.n_heads = width() / rule.width;
        rule.unit_eps = unit_eps, rule.norm_eps = norm_eps, rule.slowest = slowest;
        layer_.shares = elements<float>(shares, "shares", "float32", 2);
        require(shares.shape(0) == 6 && shares.shape(1) == width(), "shares do not fit; their shape is ", shares);
        check_matrices();
    }
    TimeMixHandle(const TimeMixHandle&) = delete;
    TimeMixHandle& operator=(const TimeMixHandle&) = delete;

    std::size_t width() const { return layer_.receptance->n_in; }
    bool is_first() const { return !layer_.first_value.down; }
    bool is_of(const IsaKernels& kernels) const { return are_of(matrices_, kernels); }
    // Points into this; fields that depend on a batch are empty.
    const TimeMix& layer() const { return layer_; }

private:
    void check_matrices() const {
        for (const Matrix* m : {layer_.receptance, layer_.key, layer_.value}) check_matrix(*m, width(), width());
        for (const LowRank* m : {&layer_.decay, &layer_.rate, &layer_.gate, &layer_.first_value})
            if (m->down) check_matrix(*m->down, m->up->n_in, width()), check_matrix(*m->up, width(), m->down->n_out);
    }

    std::vector<Weights> matrices_;
    std::vector<Array> rows_;
    Array shares_, unit_;
    TimeMix layer_{};
};

// Channel mixing and the arrays that hold its weights.
class ChannelMixHandle {
public:
    ChannelMixHandle(const Array& share, const Weights& up, const Weights& down) : share_(share), matrices_{up, down} {
        check_matrix(up.matrix, down.matrix.n_in, width()), check_matrix(down.matrix, width(), up.matrix.n_out);
        layer();  // throws if the share does not fit
    }

    std::size_t width() const { return matrices_[0].matrix.n_in; }
    bool is_of(const IsaKernels& kernels) const { return are_of(matrices_, kernels); }
    ChannelMix layer() const { return {row_of(share_, "share", width()), &matrices_[0].matrix, &matrices_[1].matrix}; }

private:
    Array share_;
    std::vector<Weights> matrices_;
};

// A whole block; the caller keeps both mixings alive.
class RwkvBlockHandle {
public:
    RwkvBlockHandle(const NormHandle& time_norm, const TimeMixHandle& time, const LinearHandle& output,
                    const NormHandle& channel_norm, const ChannelMixHandle& channel)
        : time_norm_(time_norm), channel_norm_(channel_norm), output_(output), time_(time), channel_(channel) {
        for (const NormHandle* norm : {&time_norm_, &channel_norm_})
            require(norm->norm.width == width() && norm->norm.n_rows == 1, "a norm must have the width of the block");
        check_matrix(output_.weights.matrix, width(), width());
        require(channel.width() == width(), "the mixings differ in width");
    }

    std::size_t width() const { return time_.width(); }
    bool is_first() const { return time_.is_first(); }
    const TimeMix& time() const { return time_.layer(); }
    bool is_of(const IsaKernels& kernels) const {
        return time_.is_of(kernels) && channel_.is_of(kernels) && output_.weights.kernels == &kernels;
    }
    // Points into this.
    RwkvBlock block() const {
        return {time_norm_.norm, time_.layer(), output_.linear(), channel_norm_.norm, channel_.layer()};
    }

private:
    NormHandle time_norm_, channel_norm_;
    LinearHandle output_;
    const TimeMixHandle& time_;
    const ChannelMixHandle& channel_;
};

}  // namespace slm::python
