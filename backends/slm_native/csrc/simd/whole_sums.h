// Partial sums of instruction sets that add products to int32 directly. README.md explains the names.
#pragma once

namespace SLM_NAMESPACE {

template <int bits>
constexpr int together = 8;
using Partial = Ints;
inline Partial partial_from(const Ints& sums) { return sums; }
inline Ints with_partial(const Ints&, const Partial& partial) { return partial; }

}  // namespace SLM_NAMESPACE
