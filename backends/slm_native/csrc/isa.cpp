#include "isa.h"

#if defined(SLM_HAVE_AVX2)
#include <cpuid.h>
#endif

namespace slm {

namespace {

#if defined(SLM_HAVE_AVX2)
// Not every compiler's builtin has a name for F16C, so that bit is read directly; the builtin then also asks whether
// the operating system saves the wide registers.
bool has_avx2() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_F16C)) return false;
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#else
bool has_avx2() {
    return false;
}
#endif

}  // namespace

const char* name_of(Isa isa) {
    return isa == Isa::avx2 ? "avx2" : "scalar";
}

bool is_available(Isa isa) {
    return isa == Isa::scalar || has_avx2();
}

}  // namespace slm
