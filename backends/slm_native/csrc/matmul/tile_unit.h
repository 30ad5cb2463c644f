// Tiles of a matrix unit (AMX): eight tiles of 16 rows of 64 bytes. Products are bf16, sums are float32.
//
// The compiler does not track tiles: stores must reach memory before a tile is loaded from it (publish_stores).
// _tile_loadconfig is not used: gcc 12 may drop the stores to its configuration.
#pragma once

#include <cstddef>
#include <cstdint>

namespace SLM_NAMESPACE {

constexpr int unit_rows = 16, unit_row_bytes = 64, unit_bytes = unit_rows * unit_row_bytes;

inline void publish_stores() { asm volatile("" ::: "memory"); }

#if defined(SLM_PLAIN_TILES)
// The same without the unit (Isa::amx_plain), so that tests can check the code around tiles, and its numbers.
struct PlainTiles { std::uint8_t at[8][unit_bytes]; };  // Windows aligns no thread_local to 64 bytes
inline thread_local PlainTiles plain_tiles;

inline void configure_tiles() {}
inline void release_tiles() {}
template <int tile>
inline void zero_tile() {
    __builtin_memset(plain_tiles.at[tile], 0, unit_bytes);
}
inline std::uint8_t* row_of_tile(int tile, int row) { return plain_tiles.at[tile] + row * unit_row_bytes; }
template <int tile>
inline void load_tile(const void* from, std::size_t stride) {
    const auto* row = static_cast<const std::uint8_t*>(from);
    for (int i = 0; i < unit_rows; ++i, row += stride) __builtin_memcpy(row_of_tile(tile, i), row, unit_row_bytes);
}
template <int tile>
inline void store_tile(void* to, std::size_t stride) {
    auto* row = static_cast<std::uint8_t*>(to);
    for (int i = 0; i < unit_rows; ++i, row += stride) __builtin_memcpy(row, row_of_tile(tile, i), unit_row_bytes);
}
inline float bf16_at(int tile, int row, int i) {
    std::uint16_t high;
    __builtin_memcpy(&high, row_of_tile(tile, row) + 2 * i, sizeof high);
    return high & 0x7f80 ? as_float(std::uint32_t(high) << 16) : 0.0f;  // subnormal numbers count as 0
}
// The even or the odd elements of 32 bf16, as float32.
template <bool odd>
inline __m512 half_of_bf16(const void* row) {
    const __m512i pairs = _mm512_loadu_si512(row);
    const __m512i bits =
        odd ? _mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))) : _mm512_slli_epi32(pairs, 16);
    return _mm512_castsi512_ps(
        _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7f800000)), bits));
}
template <int sums, int left, int right>
inline void multiply_tiles() {
    __m512 factors[32];
    for (int pair = 0; pair < 16; ++pair) {
        factors[2 * pair] = half_of_bf16<false>(row_of_tile(right, pair));
        factors[2 * pair + 1] = half_of_bf16<true>(row_of_tile(right, pair));
    }
    for (int row = 0; row < unit_rows; ++row) {
        __m512 sum = _mm512_loadu_ps(row_of_tile(sums, row));
        for (int k = 0; k < 32; ++k)
            sum = _mm512_add_ps(sum, _mm512_mul_ps(_mm512_set1_ps(bf16_at(left, row, k)), factors[k]));
        _mm512_storeu_ps(row_of_tile(sums, row), sum);
    }
}
#else
struct alignas(64) TileConfiguration {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfiguration) == 64);

inline void configure_tiles() {
    TileConfiguration all;
    for (int tile = 0; tile < 8; ++tile) all.rows[tile] = unit_rows, all.row_bytes[tile] = unit_row_bytes;
    asm volatile("ldtilecfg %0" ::"m"(all));
}
// A context switch saves 8 KiB of tiles unless they are released.
inline void release_tiles() { asm volatile("tilerelease"); }
template <int tile>
inline void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
// 16 rows of 64 bytes, `stride` bytes apart.
template <int tile>
inline void load_tile(const void* from, std::size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile));
}
template <int tile>
inline void store_tile(void* to, std::size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}
// sums [16][16] += left [16][32] times right, which is [16 pairs of k][16][2].
template <int sums, int left, int right>
inline void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(right));
}
#endif

constexpr std::size_t step = 32;          // numbers of a row per product of tiles
constexpr std::size_t operand = 512;      // bf16 per tile
constexpr std::size_t tile_values = 256;  // sums per tile

inline __mmask16 first_lanes(std::size_t n) { return __mmask16(n < 16 ? (1u << n) - 1 : 0xffff); }

}  // namespace SLM_NAMESPACE
