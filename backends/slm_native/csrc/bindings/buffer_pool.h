// Memory of arrays that Python lets go of, for those that come next.
#pragma once

#include <cstddef>
#include <memory>

namespace slm {

// Room for n numbers, which hold anything. What is large is kept when it is let go of and taken again, some of it: the
// system clears memory page by page before it hands it out, which takes as long as a step of a layer.
class Room {
public:
    explicit Room(std::size_t n);
    ~Room();
    Room(Room&&) noexcept = default;
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;

    float* get() const { return memory_.get(); }

private:
    std::unique_ptr<float[]> memory_;
    std::size_t size_;
};

}  // namespace slm
