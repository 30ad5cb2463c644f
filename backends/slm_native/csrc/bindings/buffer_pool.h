// Reuses the memory of arrays that Python has released.
#pragma once

#include <cstddef>
#include <memory>

namespace slm {

// An uninitialized buffer of n floats. Large buffers are pooled: the system zeroes fresh memory page by page, which
// takes as long as a step of a layer.
class Buffer {
public:
    explicit Buffer(std::size_t n);
    ~Buffer();
    Buffer(Buffer&&) noexcept = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    float* get() const { return memory_.get(); }

private:
    std::unique_ptr<float[]> memory_;
    std::size_t size_;
};

}  // namespace slm
