#include "isa.h"

#include <cstddef>

#if defined(SLM_HAVE_X86)
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
// Not every compiler's builtin has a name for F16C, so that bit is read directly. The builtin also checks that the
// operating system saves the wide registers.
bool has_avx2() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_F16C)) return false;
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool has_avx_vnni() {
    if (!has_avx2()) return false;
#if defined(SLM_CHECK_VNNI_AS_AVX512)
    return __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#else  // not every builtin has a name for this bit
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & 1u << 4);
#endif
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

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
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    return (edx & products_of_bf16) && (edx & tiles) && may_use_tiles();
}
#else
bool has_amx() { return false; }
#endif
#else
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
