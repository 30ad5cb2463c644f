#include "bindings/buffer_pool.h"

#include <mutex>
#include <utility>
#include <vector>

namespace slm {

namespace {

constexpr std::size_t least = 1 << 17;        // floats; malloc serves smaller buffers from memory of the process
constexpr std::size_t most_in_all = 1 << 24;  // 64 MiB
constexpr std::size_t most_pieces = 16;

struct Piece {
    std::unique_ptr<float[]> memory;
    std::size_t size = 0;
};

class BufferPool {
public:
    BufferPool() { pieces_.reserve(most_pieces + 1); }  // give() must not allocate

    // The smallest piece of which n floats fill at least half; an empty one if there is none.
    Piece take(std::size_t n) {
        std::lock_guard lock(mutex_);
        std::size_t best = pieces_.size();
        for (std::size_t i = 0; i < pieces_.size(); ++i)
            if (pieces_[i].size >= n && pieces_[i].size / 2 <= n &&
                (best == pieces_.size() || pieces_[i].size < pieces_[best].size))
                best = i;
        return best < pieces_.size() ? remove(best) : Piece{};
    }

    void give(Piece piece) {
        std::lock_guard lock(mutex_);
        in_all_ += piece.size;
        pieces_.push_back(std::move(piece));
        while (in_all_ > most_in_all || pieces_.size() > most_pieces) remove(0);  // drops the oldest
    }

private:
    Piece remove(std::size_t i) {
        Piece piece = std::move(pieces_[i]);
        pieces_.erase(pieces_.begin() + std::ptrdiff_t(i));
        in_all_ -= piece.size;
        return piece;
    }

    std::mutex mutex_;
    std::vector<Piece> pieces_;
    std::size_t in_all_ = 0;
};

// Never destroyed: the last array may be freed after the end of main.
BufferPool& kept() {
    static BufferPool& all = *new BufferPool;
    return all;
}

}  // namespace

Buffer::Buffer(std::size_t n) : size_(n) {
    if (n >= least) {
        Piece piece = kept().take(n);
        if (piece.memory) memory_ = std::move(piece.memory), size_ = piece.size;
    }
    if (!memory_) memory_.reset(new float[n]);
}

Buffer::~Buffer() {
    if (memory_ && size_ >= least) kept().give({std::move(memory_), size_});
}

}  // namespace slm
