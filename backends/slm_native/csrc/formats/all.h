// All quantized formats. The list is a macro because each entry becomes a row of a table of functions.
#pragma once

#include "formats/fp4.h"
#include "formats/iq4.h"
#include "formats/q2_k.h"
#include "formats/q3_k.h"
#include "formats/q4_0.h"
#include "formats/q4_1.h"
#include "formats/q4_k.h"
#include "formats/q5_0.h"
#include "formats/q5_1.h"
#include "formats/q5_k.h"
#include "formats/q6_k.h"
#include "formats/q8_0.h"
#include "formats/low_bits.h"

// clang-format off
#define SLM_FORMATS(X) \
    X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL) X(IQ4_XS) X(MXFP4) \
    X(NVFP4) X(TQ1_0) X(TQ2_0) X(Q1_0)
// clang-format on

namespace SLM_NAMESPACE {

// The factors of a span; an instruction set may specialize this.
template <class Format>
inline Scales factors_of(const std::uint8_t* span) {
    return Format::factors(span);
}

}  // namespace SLM_NAMESPACE
