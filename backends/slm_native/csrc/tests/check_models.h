// Small models with random weights; together they cover all optional parts of a layer.
#pragma once

#include <memory>
#include <vector>

#include "tests/reference_layers.h"

namespace slm {

struct NamedModel {
    const char* name;
    std::unique_ptr<Model> model;
    bool rounds;  // whether keys and values may be quantized: a small change of them changes results little
};

std::vector<NamedModel> models_of(const IsaKernels& kernels);

std::vector<float> random_floats(std::size_t n, unsigned seed, float scale);

}  // namespace slm
