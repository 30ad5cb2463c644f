// Handles of Mamba, Mamba 2 and gated convolutions.
#pragma once

#include <string>
#include <vector>

#include "bindings/handles.h"
#include "layers/recurrent.h"

namespace slm::python {

// The taps of a convolution, [W][channels].
inline std::size_t n_taps_of(const Array& taps) {
    elements<float>(taps, "taps", "float32", 2);
    require(taps.size() != 0, "no taps");
    return taps.shape(0);
}

// The values of a float32 array [n_rows][width].
inline const float* rows_of(const Array& array, const char* name, std::size_t n_rows, std::size_t width) {
    const float* values = elements<float>(array, name, "float32", 2);
    require(array.shape(0) == n_rows && array.shape(1) == width, name, " does not fit the others; its shape is ",
            array);
    return values;
}

// The shape of a sequence's state: the window [n_taps - 1][n_convolved], and [heads][width][n_state] or nothing.
struct StateShape { std::size_t n_taps, n_convolved, heads, width, n_state; };

// Mamba and the arrays that hold its weights.
class MambaHandle {
public:
    MambaHandle(const Array& taps, const MaybeArray& conv_bias, const Weights& select, const MaybeArray& step_norm,
                const MaybeArray& b_norm, const MaybeArray& c_norm, const std::vector<float>& epsilons,
                const Weights& steps, const MaybeArray& step_bias, const Array& a, const Array& d)
        : select_(select), steps_(steps), arrays_{taps, conv_bias, step_norm, b_norm, c_norm, step_bias, a, d} {
        layer_.n_inner = steps.matrix.n_out, layer_.n_rank = steps.matrix.n_in,
        layer_.n_state = a.ndim() == 2 ? a.shape(1) : 0;
        const std::size_t inner = layer_.n_inner, n_state = layer_.n_state;
        require(select.matrix.n_in == inner && select.matrix.n_out == layer_.n_rank + 2 * n_state,
                "select and steps do not fit each other");
        require(epsilons.size() == 3, "three norms need three epsilons");
        layer_.n_taps = n_taps_of(taps), layer_.taps = rows_of(taps, "taps", layer_.n_taps, inner);
        layer_.conv_bias = row_of(conv_bias, "conv_bias", inner),
        layer_.step_bias = row_of(step_bias, "step_bias", inner);
        layer_.select = &select_.matrix, layer_.steps = &steps_.matrix;
        layer_.norms[0] = {
            row_of(step_norm, "step_norm", layer_.n_rank), nullptr, layer_.n_rank, 1, epsilons[0], false};
        layer_.norms[1] = {row_of(b_norm, "b_norm", n_state), nullptr, n_state, 1, epsilons[1], false};
        layer_.norms[2] = {row_of(c_norm, "c_norm", n_state), nullptr, n_state, 1, epsilons[2], false};
        layer_.a = rows_of(a, "a", inner, n_state), layer_.d = row_of(d, "d", inner);
    }
    MambaHandle(const MambaHandle&) = delete;
    MambaHandle& operator=(const MambaHandle&) = delete;

    // Points into this.
    const Mamba& layer() const { return layer_; }
    std::size_t n_projected() const { return 2 * layer_.n_inner; }
    std::size_t n_inner() const { return layer_.n_inner; }
    StateShape state_shape() const { return {layer_.n_taps, layer_.n_inner, layer_.n_inner, 1, layer_.n_state}; }
    bool is_of(const IsaKernels& kernels) const { return select_.kernels == &kernels && steps_.kernels == &kernels; }

private:
    Weights select_, steps_;
    std::vector<MaybeArray> arrays_;
    Mamba layer_{};
};

// Mamba 2 and the arrays that hold its weights.
class Mamba2Handle {
public:
    Mamba2Handle(const Array& taps, const MaybeArray& conv_bias, const Array& step_bias, const Array& a, const Array& d,
                 const MaybeArray& norm, float eps, std::size_t n_groups, std::size_t n_state)
        : arrays_{taps, conv_bias, step_bias, a, d, norm} {
        layer_.n_heads = step_bias.size(), layer_.n_groups = n_groups, layer_.n_state = n_state;
        require(layer_.n_heads != 0 && n_groups != 0 && layer_.n_heads % n_groups == 0,
                "heads must be a multiple of the groups, at least one");
        layer_.n_taps = n_taps_of(taps), layer_.taps = static_cast<const float*>(taps.data());
        const std::size_t n_convolved = taps.shape(1), n_selected = 2 * n_groups * n_state;
        require(n_convolved > n_selected && (n_convolved - n_selected) % layer_.n_heads == 0,
                "heads do not fill the taps");
        const std::size_t inner = layer_.n_inner = n_convolved - n_selected;
        require(inner % n_groups == 0, "n_groups must divide the width of the heads");
        layer_.conv_bias = row_of(conv_bias, "conv_bias", n_convolved),
        layer_.step_bias = row_of(step_bias, "step_bias", layer_.n_heads);
        layer_.a = rows_of(a, "a", layer_.n_heads, 1), layer_.d = rows_of(d, "d", layer_.n_heads, 1);
        layer_.norm = {norm ? rows_of(*norm, "norm", n_groups, inner / n_groups) : nullptr,
                       nullptr,
                       inner / n_groups,
                       n_groups,
                       eps,
                       false};
    }
    Mamba2Handle(const Mamba2Handle&) = delete;
    Mamba2Handle& operator=(const Mamba2Handle&) = delete;

    // Points into this.
    const Mamba2& layer() const { return layer_; }
    std::size_t n_projected() const { return n_inner() + n_convolved() + layer_.n_heads; }
    std::size_t n_inner() const { return layer_.n_inner; }
    StateShape state_shape() const {
        return {layer_.n_taps, n_convolved(), layer_.n_heads, n_inner() / layer_.n_heads, layer_.n_state};
    }

private:
    std::size_t n_convolved() const { return layer_.n_inner + 2 * layer_.n_groups * layer_.n_state; }

    std::vector<MaybeArray> arrays_;
    Mamba2 layer_{};
};

// A layer from its norm to its output matrix. The caller keeps the part between its projections alive.
class RecurrentLayerHandle {
public:
    RecurrentLayerHandle(const MaybeNorm& norm, const LinearHandle& project, const MambaHandle& mamba,
                         const LinearHandle& output)
        : norm_(norm), project_(project), output_(output), state_shape_(mamba.state_shape()), mamba_(&mamba) {
        check(mamba.n_projected(), mamba.n_inner());
        layer_.mamba = &mamba.layer();
    }
    RecurrentLayerHandle(const MaybeNorm& norm, const LinearHandle& project, const Mamba2Handle& mamba2,
                         const LinearHandle& output)
        : norm_(norm), project_(project), output_(output), state_shape_(mamba2.state_shape()) {
        check(mamba2.n_projected(), mamba2.n_inner());
        layer_.mamba2 = &mamba2.layer();
    }
    RecurrentLayerHandle(const MaybeNorm& norm, const LinearHandle& project, const Array& taps,
                         const LinearHandle& output)
        : norm_(norm), project_(project), output_(output), taps_(taps),
          state_shape_{n_taps_of(taps), taps.shape(1), 0, 0, 0} {
        check(3 * taps.shape(1), taps.shape(1));
        layer_.taps = static_cast<const float*>(taps.data()), layer_.n_taps = state_shape_.n_taps;
    }
    RecurrentLayerHandle(const RecurrentLayerHandle&) = delete;
    RecurrentLayerHandle& operator=(const RecurrentLayerHandle&) = delete;

    // Points into this.
    const RecurrentLayer& layer() const { return layer_; }
    std::size_t width() const { return project_.weights.matrix.n_in; }
    const StateShape& state_shape() const { return state_shape_; }
    bool has_state() const { return !taps_; }
    bool is_of(const IsaKernels& kernels) const {
        return project_.weights.kernels == &kernels && output_.weights.kernels == &kernels &&
               (!mamba_ || mamba_->is_of(kernels));
    }

private:
    void check(std::size_t n_projected, std::size_t n_inner) {
        const Matrix &project = project_.weights.matrix, &output = output_.weights.matrix;
        require(project.n_out == n_projected && output.n_in == n_inner && output.n_out == project.n_in,
                "project and output do not fit the widths between them");
        require(!norm_ || (norm_->norm.width == width() && norm_->norm.n_rows == 1),
                "the norm must have the width of the layer");
        layer_.norm = norm_ ? norm_->norm : Norm{}, layer_.project = project_.linear(),
        layer_.output = output_.linear();
    }

    MaybeNorm norm_;
    LinearHandle project_, output_;
    MaybeArray taps_;
    StateShape state_shape_;
    const MambaHandle* mamba_ = nullptr;
    RecurrentLayer layer_{};
};

}  // namespace slm::python
