#include "isa.h"

#include <cstddef>

#if defined(SLM_HAVE_X86) && defined(_MSC_VER)
#include <intrin.h>
#elif defined(SLM_HAVE_X86)
#include <cpuid.h>
#endif
#if defined(SLM_HAVE_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(SLM_HAVE_NEON) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(SLM_HAVE_NEON) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace slm {

namespace {

#if defined(SLM_HAVE_X86)
// CPUID is read directly: compilers' builtins lack names for some of its bits, and need a library on Windows.
struct CpuId { unsigned eax = 0, ebx = 0, ecx = 0, edx = 0; };

CpuId cpu_id(unsigned leaf, unsigned subleaf) {
    CpuId id;
#if defined(_MSC_VER)
    int most[4], all[4];
    __cpuid(most, 0);
    if (unsigned(most[0]) < leaf) return id;
    __cpuidex(all, int(leaf), int(subleaf));
    id = {unsigned(all[0]), unsigned(all[1]), unsigned(all[2]), unsigned(all[3])};
#else
    if (!__get_cpuid_count(leaf, subleaf, &id.eax, &id.ebx, &id.ecx, &id.edx)) return {};
#endif
    return id;
}

bool has_bits(unsigned word, unsigned bits) { return (word & bits) == bits; }

// Whether the operating system saves these registers, by their bits in the register XCR0.
bool are_saved(unsigned registers) {
    constexpr unsigned os_uses_xsave = 1u << 27;
    if (!has_bits(cpu_id(1, 0).ecx, os_uses_xsave)) return false;
#if defined(_MSC_VER)
    const unsigned saved = unsigned(_xgetbv(0));
#else
    unsigned saved = 0, high = 0;
    asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
#endif
#if defined(__APPLE__)  // macOS saves the registers of AVX-512 from their first use on
    constexpr unsigned of_avx512 = 0xe0;
    registers &= ~of_avx512;
#endif
    return has_bits(saved, registers);
}

bool has_avx2() {
    constexpr unsigned fma = 1u << 12, avx = 1u << 28, f16c = 1u << 29, avx2 = 1u << 5;
    constexpr unsigned xmm_and_ymm = 0x6;
    return has_bits(cpu_id(1, 0).ecx, fma | avx | f16c) && has_bits(cpu_id(7, 0).ebx, avx2) && are_saved(xmm_and_ymm);
}

bool has_avx512() {
    constexpr unsigned f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31, vnni = 1u << 11;
    constexpr unsigned masks_and_zmm = 0xe0;
    const CpuId id = cpu_id(7, 0);
    return has_avx2() && has_bits(id.ebx, f | dq | bw | vl) && has_bits(id.ecx, vnni) && are_saved(masks_and_zmm);
}

bool has_avx_vnni() {
#if defined(SLM_CHECK_VNNI_AS_AVX512)
    return has_avx512();
#else
    constexpr unsigned avx_vnni = 1u << 4;
    return has_avx2() && has_bits(cpu_id(7, 1).eax, avx_vnni);
#endif
}

// Zen 3 and Zen 4 read weights faster row by row than four rows side by side: 75 tokens per second instead of 47 (Zen
// 4, AVX-512, 0.6e9 weights in Q4_0). Zen 5 reaches its memory bandwidth side by side.
bool is_zen_3_or_4() noexcept {
    const CpuId vendor = cpu_id(0, 0);
    const bool is_amd = vendor.ebx == 0x68747541 && vendor.edx == 0x69746e65 && vendor.ecx == 0x444d4163;
    const unsigned version = cpu_id(1, 0).eax;
    return is_amd && (version >> 8 & 0xf) + (version >> 20 & 0xff) == 0x19;
}

bool has_avx512_bf16() {
    constexpr unsigned bf16 = 1u << 5;
    return has_avx512() && has_bits(cpu_id(7, 1).eax, bf16);
}

#if defined(__linux__)
// The registers of the unit are large, so a process must request them from Linux. Linux refuses if signal stacks of
// threads are too small.
bool may_use_tiles() {
    constexpr int ask_for_registers = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    static const bool may = syscall(SYS_arch_prctl, ask_for_registers, tile_data) == 0;
    return may;
}

bool has_amx() {
    constexpr unsigned products_of_bf16 = 1u << 22, tiles = 1u << 24;
    return has_avx512_bf16() && has_bits(cpu_id(7, 0).edx, products_of_bf16 | tiles) && may_use_tiles();
}
#else
bool has_amx() { return false; }
#endif
#else
bool is_zen_3_or_4() noexcept { return false; }
bool has_avx2() { return false; }
bool has_avx_vnni() { return false; }
bool has_avx512() { return false; }
bool has_avx512_bf16() { return false; }
bool has_amx() { return false; }
#endif

#if defined(SLM_HAVE_NEON) && defined(__linux__)
bool has_neon() {
    constexpr unsigned long dot_products = 1ul << 20;  // HWCAP_ASIMDDP
    return getauxval(AT_HWCAP) & dot_products;
}

bool has_neon_i8mm() {
    constexpr unsigned long products_of_matrices = 1ul << 13;  // HWCAP2_I8MM
    return has_neon() && (getauxval(AT_HWCAP2) & products_of_matrices);
}
#elif defined(SLM_HAVE_NEON) && defined(__APPLE__)
bool has_feature(const char* name) {
    int there = 0;
    std::size_t size = sizeof there;
    return sysctlbyname(name, &there, &size, nullptr, 0) == 0 && there;
}

bool has_neon() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_neon_i8mm() { return has_neon() && has_feature("hw.optional.arm.FEAT_I8MM"); }
#else
bool has_neon() { return false; }
bool has_neon_i8mm() { return false; }
#endif

}  // namespace

bool reads_one_stream = is_zen_3_or_4();

const char* name_of(Isa isa) {
    switch (isa) {
        case Isa::amx_plain: return "amx_plain";
        case Isa::avx2: return "avx2";
        case Isa::avx_vnni: return "avx_vnni";
        case Isa::avx512: return "avx512";
        case Isa::avx512_bf16: return "avx512_bf16";
        case Isa::amx: return "amx";
        case Isa::neon: return "neon";
        case Isa::neon_i8mm: return "neon_i8mm";
        default: return "scalar";
    }
}

bool is_available(Isa isa) {
#if defined(SLM_UP_TO_AVX2)
    if (isa != Isa::avx2 && isa != Isa::scalar) return false;
#endif
    switch (isa) {
        case Isa::amx_plain: return has_avx512();
        case Isa::avx2: return has_avx2();
        case Isa::avx_vnni: return has_avx_vnni();
        case Isa::avx512: return has_avx512();
        case Isa::avx512_bf16: return has_avx512_bf16();
        case Isa::amx: return has_amx();
        case Isa::neon: return has_neon();
        case Isa::neon_i8mm: return has_neon_i8mm();
        default: return true;
    }
}

}  // namespace slm
