// Blocks of quantized weights in the layout of the model file: unaligned, little-endian.
//
// Fields have ggml's names and sizes (ggml-common.h); slm_core/quant defines their meaning, one file per format.
#pragma once

#include <cstddef>
#include <cstdint>

namespace slm {

// Internal linkage: each file has its own copy, compiled for its own instruction set.
static inline std::uint16_t read16(const void* p) {
    std::uint16_t value;
    __builtin_memcpy(&value, p, sizeof value);
    return value;
}
static inline std::uint32_t read32(const void* p) {
    std::uint32_t value;
    __builtin_memcpy(&value, p, sizeof value);
    return value;
}
static inline std::uint64_t read64(const void* p) {
    std::uint64_t value;
    __builtin_memcpy(&value, p, sizeof value);
    return value;
}
static inline std::uint32_t as_bits(float value) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}
static inline float as_float(std::uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// clang-format off: a line each
#pragma pack(push, 1)
struct BlockQ4_0 { std::uint16_t d; std::uint8_t qs[16]; };
struct BlockQ4_1 { std::uint16_t d, m; std::uint8_t qs[16]; };
struct BlockQ5_0 { std::uint16_t d; std::uint8_t qh[4], qs[16]; };
struct BlockQ5_1 { std::uint16_t d, m; std::uint8_t qh[4], qs[16]; };
struct BlockQ8_0 { std::uint16_t d; std::int8_t qs[32]; };
struct BlockQ2_K { std::uint8_t scales[16], qs[64]; std::uint16_t d, dmin; };
struct BlockQ3_K { std::uint8_t hmask[32], qs[64], scales[12]; std::uint16_t d; };
struct BlockQ4_K { std::uint16_t d, dmin; std::uint8_t scales[12], qs[128]; };
struct BlockQ5_K { std::uint16_t d, dmin; std::uint8_t scales[12], qh[32], qs[128]; };
struct BlockQ6_K { std::uint8_t ql[128], qh[64]; std::int8_t scales[16]; std::uint16_t d; };
struct BlockIQ4_NL { std::uint16_t d; std::uint8_t qs[16]; };
struct BlockIQ4_XS { std::uint16_t d, scales_h; std::uint8_t scales_l[4], qs[128]; };
struct BlockMXFP4 { std::uint8_t e, qs[16]; };
struct BlockNVFP4 { std::uint8_t d[4], qs[32]; };
struct BlockTQ1_0 { std::uint8_t qs[48], qh[4]; std::uint16_t d; };
struct BlockTQ2_0 { std::uint8_t qs[64]; std::uint16_t d; };
struct BlockQ1_0 { std::uint16_t d; std::uint8_t qs[16]; };
#pragma pack(pop)
// clang-format on

static_assert(sizeof(BlockQ4_0) == 18 && alignof(BlockQ4_0) == 1);
static_assert(sizeof(BlockQ4_1) == 20 && sizeof(BlockQ5_0) == 22 && sizeof(BlockQ5_1) == 24);
static_assert(sizeof(BlockQ8_0) == 34 && sizeof(BlockQ2_K) == 84 && sizeof(BlockQ3_K) == 110);
static_assert(sizeof(BlockQ4_K) == 144 && sizeof(BlockQ5_K) == 176 && sizeof(BlockQ6_K) == 210);
static_assert(sizeof(BlockIQ4_NL) == 18 && sizeof(BlockIQ4_XS) == 136 && sizeof(BlockMXFP4) == 17);
static_assert(sizeof(BlockNVFP4) == 36 && sizeof(BlockTQ1_0) == 54 && sizeof(BlockTQ2_0) == 66);
static_assert(sizeof(BlockQ1_0) == 18);

}  // namespace slm
