#include "bindings/buffer_pool.h"

#include <mutex>
#include <utility>
#include <vector>

namespace slm {

namespace {

constexpr std::size_t min_pooled = 1 << 17;  // floats; for smaller buffers, malloc reuses memory
constexpr std::size_t max_total = 1 << 24;   // 64 MiB
constexpr std::size_t max_pieces = 16;

struct Piece {
    std::unique_ptr<float[]> memory;
    std::size_t size = 0;
};

class BufferPool {
public:
    BufferPool() { pieces_.reserve(max_pieces + 1); }  // give() must not allocate

    // The smallest piece that holds n floats and is at most twice as large; an empty piece if there is none.
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
        total_ += piece.size;
        pieces_.push_back(std::move(piece));
        while (total_ > max_total || pieces_.size() > max_pieces) remove(0);  // drops the oldest
    }

private:
    Piece remove(std::size_t i) {
        Piece piece = std::move(pieces_[i]);
        pieces_.erase(pieces_.begin() + std::ptrdiff_t(i));
        total_ -= piece.size;
        return piece;
    }

    std::mutex mutex_;
    std::vector<Piece> pieces_;
    std::size_t total_ = 0;
};

// Never destroyed: the last array may be freed after the end of main.
BufferPool& buffer_pool() {
    static BufferPool& all = *new BufferPool;
    return all;
}

}  // namespace

Buffer::Buffer(std::size_t n) : size_(n) {
    if (n >= min_pooled) {
        Piece piece = buffer_pool().take(n);
        if (piece.memory) memory_ = std::move(piece.memory), size_ = piece.size;
    }
    if (!memory_) memory_.reset(new float[n]);
}

Buffer::~Buffer() {
    if (memory_ && size_ >= min_pooled) buffer_pool().give({std::move(memory_), size_});
}

}  // namespace slm
