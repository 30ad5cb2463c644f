// Steps between products, shared among threads.
#pragma once

#include <algorithm>
#include <cstddef>

#include "pool.h"

namespace slm {

constexpr std::size_t least_part = 1 << 13;  // values; less is done before a thread has heard of it

// task(begin, end) for parts of `n` rows, of each of which so many values are read.
template <class Task>
void by_rows(Pool& pool, std::size_t n, std::size_t width, const Task& task) {
    const std::size_t step = std::max<std::size_t>(1, least_part / std::max<std::size_t>(1, width));
    pool.run((n + step - 1) / step, [&](std::size_t i) { task(i * step, std::min(n, (i + 1) * step)); });
}

}  // namespace slm
