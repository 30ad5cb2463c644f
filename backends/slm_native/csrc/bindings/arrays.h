// Conversion of arrays from and to Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings/buffer_pool.h"
#include "bindings/require.h"

namespace slm::python {

using FloatMatrix = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
using HeadArray = nb::ndarray<nb::numpy, float, nb::ndim<3>>;
using StateArray = nb::ndarray<nb::numpy, float, nb::ndim<4>>;

inline bool is_contiguous(const Array& array) {
    if (array.size() == 0) return true;
    std::int64_t step = 1;
    for (std::size_t i = array.ndim(); i-- > 0; step *= std::int64_t(array.shape(i)))
        if (array.shape(i) > 1 && array.stride(i) != step) return false;
    return true;
}

// A pointer to the elements of an aligned, C-contiguous array of the given type and number of dimensions.
template <typename T>
const T* elements(const Array& array, const char* name, const char* type, std::size_t ndim) {
    if (array.dtype() != nb::dtype<T>()) throw nb::type_error(message(name, " must be ", type).c_str());
    const bool aligned = reinterpret_cast<std::uintptr_t>(array.data()) % alignof(T) == 0;
    require(array.ndim() == ndim && is_contiguous(array) && aligned, name, " must be aligned and C-contiguous with ",
            ndim, " dimension(s); its shape is ", array);
    return static_cast<const T*>(array.data());
}

// An array that owns the buffer `values`.
template <class Owned>
Owned owned(Buffer values, std::initializer_list<std::size_t> shape) {
    float* data = values.get();
    nb::capsule owner(new Buffer(std::move(values)), [](void* p) noexcept { delete static_cast<Buffer*>(p); });
    return Owned(data, shape, owner);
}

// The n values of a float32 array; null without an array.
inline const float* row_of(const std::optional<Array>& array, const char* name, std::size_t n) {
    if (!array) return nullptr;
    const float* values = elements<float>(*array, name, "float32", 1);
    require(array->shape(0) == n, name, " has ", array->shape(0), " numbers, not ", n);
    return values;
}

}  // namespace slm::python
