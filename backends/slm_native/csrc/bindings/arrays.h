// Arrays that come from Python and go there.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings/buffer_pool.h"

namespace slm::python {

namespace nb = nanobind;

using Array = nb::ndarray<nb::ro, nb::device::cpu>;
using FloatMatrix = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
using HeadArray = nb::ndarray<nb::numpy, float, nb::ndim<3>>;
using StateArray = nb::ndarray<nb::numpy, float, nb::ndim<4>>;

inline std::string shape_of(const Array& array) {
    std::string text = "[";
    for (std::size_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
    return text + "]";
}

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
    if (array.dtype() != nb::dtype<T>()) throw nb::type_error((name + (" must be " + std::string(type))).c_str());
    const bool aligned = reinterpret_cast<std::uintptr_t>(array.data()) % alignof(T) == 0;
    if (array.ndim() != ndim || !is_contiguous(array) || !aligned)
        throw nb::value_error((std::string(name) + " must be aligned and C-contiguous with " + std::to_string(ndim) +
                               " dimension(s); its shape is " + shape_of(array))
                                  .c_str());
    return static_cast<const T*>(array.data());
}

// Memory of `values` as an array that owns it.
template <class Owned>
Owned owned(Room values, std::initializer_list<std::size_t> shape) {
    float* data = values.get();
    nb::capsule owner(new Room(std::move(values)), [](void* p) noexcept { delete static_cast<Room*>(p); });
    return Owned(data, shape, owner);
}

// One number for each of `n`, or null where there is no array.
inline const float* row_of(const std::optional<Array>& array, const char* name, std::size_t n) {
    if (!array) return nullptr;
    const float* values = elements<float>(*array, name, "float32", 1);
    if (array->shape(0) != n)
        throw nb::value_error((std::string(name) + " has " + std::to_string(array->shape(0)) + " numbers, not " +
                               std::to_string(n)).c_str());
    return values;
}

}  // namespace slm::python
