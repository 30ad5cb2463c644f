// Python bindings: checks of arguments, and nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "isa.h"
#include "quant/q8_0.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Array = nb::ndarray<nb::ro, nb::device::cpu>;
using FloatMatrix = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

std::string shape_of(const Array& array) {
    std::string text = "[";
    for (std::size_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
    return text + "]";
}

bool is_contiguous(const Array& array) {
    if (array.size() == 0) return true;
    std::int64_t step = 1;
    for (std::size_t i = array.ndim(); i-- > 0; step *= std::int64_t(array.shape(i)))
        if (array.shape(i) > 1 && array.stride(i) != step) return false;
    return true;
}

// A pointer to the elements of an aligned, C-contiguous array of the given type and number of dimensions.
template <typename T>
const T* elements(const Array& array, const char* name, const char* type, std::size_t ndim) {
    if (array.dtype() != nb::dtype<T>()) throw nb::type_error((name + (" must be " + std::string(type))).c_str());
    const bool aligned = reinterpret_cast<std::uintptr_t>(array.data()) % alignof(T) == 0;
    if (array.ndim() != ndim || !is_contiguous(array) || !aligned)
        throw nb::value_error((std::string(name) + " must be aligned and C-contiguous with " + std::to_string(ndim) +
                               " dimension(s); its shape is " + shape_of(array))
                                  .c_str());
    return static_cast<const T*>(array.data());
}

FloatMatrix new_matrix(std::unique_ptr<float[]> values, std::size_t n_rows, std::size_t n_cols) {
    float* data = values.get();
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    values.release();
    return FloatMatrix(data, {n_rows, n_cols}, owner);
}

slm::Isa find_isa(const std::string& name) {
    for (slm::Isa isa : slm::all_isas)
        if (slm::name_of(isa) == name && slm::is_available(isa)) return isa;
    throw nb::value_error(("instruction set '" + name + "' is not available here").c_str());
}

class Kernels {
public:
    explicit Kernels(const std::string& isa) : q8_0_matmul_(slm::q8_0::matmul_for(find_isa(isa))) {}

    FloatMatrix q8_0_matmul(const Array& x, const Array& weights) const {
        using namespace slm::q8_0;
        const float* x_values = elements<float>(x, "x", "float32", 2);
        const auto* blocks = reinterpret_cast<const Block*>(elements<std::uint8_t>(weights, "weights", "uint8", 1));
        const std::size_t n_tokens = x.shape(0), n_in = x.shape(1), n_blocks = n_in / block_size;
        if (n_in == 0 || n_in % block_size)
            throw nb::value_error(("x has rows of " + std::to_string(n_in) + ", not a multiple of 32").c_str());
        const std::size_t n_bytes = weights.shape(0), row_bytes = n_blocks * sizeof(Block);
        if (n_bytes % row_bytes)
            throw nb::value_error(("weights has " + std::to_string(n_bytes) + " bytes, not a whole number of rows of " +
                                   std::to_string(row_bytes))
                                      .c_str());
        const std::size_t n_out = n_bytes / row_bytes;
        std::unique_ptr<float[]> y(new float[n_tokens * n_out]);
        {
            nb::gil_scoped_release unlocked;
            q8_0_matmul_(blocks, n_out, n_blocks, x_values, n_tokens, y.get());
        }
        return new_matrix(std::move(y), n_tokens, n_out);
    }

private:
    slm::q8_0::Matmul* q8_0_matmul_;
};

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (slm::Isa isa : slm::all_isas)
        if (slm::is_available(isa)) names.emplace_back(slm::name_of(isa));
    return names;
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "C++ kernels of the native engine.";
    module.def("available_isas", &available_isas,
               "Instruction sets that this build has and this machine can run, the best last.");
    nb::class_<Kernels>(module, "Kernels",
                        "Kernels of one instruction set.\n\n"
                        "Args:\n    isa: one of available_isas(); ValueError for any other.")
        .def(nb::init<const std::string&>(), "isa"_a)
        .def("q8_0_matmul", &Kernels::q8_0_matmul, "x"_a, "weights"_a,
             "x @ weights.T in float32, without the GIL: [T, in] to [T, out].\n\n"
             "Args:\n"
             "    x: float32 [T, in], C-contiguous, in a multiple of 32.\n"
             "    weights: uint8 [out * in / 32 * 34], Q8_0 blocks row by row, at any address.\n\n"
             "Raises:\n"
             "    TypeError: a wrong dtype, or no CPU array.\n"
             "    ValueError: a wrong shape or layout.");
}
