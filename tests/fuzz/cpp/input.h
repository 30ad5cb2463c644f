// Numbers and bytes from a fuzzer's input.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "isa.h"

namespace fuzz {

class Input {
public:
    Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

    // A number from 0 to n - 1; 0 at the end of the input.
    std::size_t below(std::size_t n) { return size_ ? (--size_, *data_++) % n : 0; }

    // The rest of the input, repeated, as an allocation of exactly n bytes: sanitizers find reads past its end.
    std::unique_ptr<std::uint8_t[]> bytes(std::size_t n) {
        std::unique_ptr<std::uint8_t[]> result(new std::uint8_t[n]);
        for (std::size_t i = 0; i < n; ++i) result[i] = size_ ? data_[i % size_] : std::uint8_t(i * 37);
        return result;
    }

private:
    const std::uint8_t* data_;
    std::size_t size_;
};

// An instruction set that this machine has.
inline slm::Isa isa_of(Input& input) {
    std::vector<slm::Isa> available;
    for (slm::Isa isa : slm::all_isas)
        if (slm::is_available(isa)) available.push_back(isa);
    return available[input.below(available.size())];
}

// n activations of an ordinary size.
inline std::vector<float> activations(std::size_t n) {
    std::vector<float> x(n);
    for (std::size_t i = 0; i < n; ++i) x[i] = float(int(i * 2654435761u >> 8 & 0xfff) - 2048) / 512.0f;
    return x;
}

}  // namespace fuzz
