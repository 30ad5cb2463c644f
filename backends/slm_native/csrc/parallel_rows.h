// Loops over rows, divided among threads.
#pragma once

#include <algorithm>
#include <cstddef>

#include "pool.h"

namespace slm {

constexpr std::size_t least_part = 1 << 13;  // values; for fewer, another thread costs more than it saves
constexpr std::size_t short_work = 1 << 17;  // values; one thread reads them in about 10 us

// Runs task(begin, end) for parts of `n` rows, with `width` values to read per row. Parts are long, so that the
// hardware prefetches consecutive rows.
template <class Task>
void by_rows(Pool& pool, std::size_t n, std::size_t width, const Task& task) {
    const std::size_t n_parts = std::clamp<std::size_t>(n * width / least_part, 1, 4 * std::size_t(pool.n_threads()));
    const std::size_t step = (n + n_parts - 1) / n_parts;
    if (n == 0) return;
    pool.run((n + step - 1) / step, [&](std::size_t i) { task(i * step, std::min(n, (i + 1) * step)); },
             n * width <= short_work);
}

}  // namespace slm
