// Checks of arguments that come from Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <type_traits>

namespace slm::python {

namespace nb = nanobind;

using Array = nb::ndarray<nb::ro, nb::device::cpu>;

inline std::string shape_of(const Array& array) {
    std::string text = "[";
    for (std::size_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
    return text + "]";
}

// One part of a message: text, an integer, or an array, which is printed as its shape.
template <class Part>
std::string text_of(const Part& part) {
    if constexpr (std::is_integral_v<Part>) return std::to_string(part);
    else if constexpr (std::is_same_v<Part, Array>) return shape_of(part);
    else return std::string(part);
}

template <class... Parts>
std::string message(const Parts&... parts) {
    return (text_of(parts) + ...);
}

// Throws ValueError with a message of these parts.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    throw nb::value_error(message(parts...).c_str());
}

// Throws ValueError with these parts unless `condition` holds; the message is built only then.
template <class... Parts>
void require(bool condition, const Parts&... parts) {
    if (!condition) fail(parts...);
}

}  // namespace slm::python
