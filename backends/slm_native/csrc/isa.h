// The instruction sets of this build and this machine. Files of every instruction set include this header, so it
// neither defines nor includes functions (see simd/README.md).
//
// amx_plain is for tests: the AMX kernels with tile products in AVX-512. Its results equal the results of AMX, on any
// machine with AVX-512.
#pragma once

namespace slm {

enum class Isa { amx_plain, scalar, avx2, avx_vnni, avx512, avx512_bf16, amx, neon, neon_i8mm };

// In ascending order of speed. amx_plain comes first, so that no machine chooses it by default.
inline constexpr Isa all_isas[] = {Isa::amx_plain,   Isa::scalar, Isa::avx2, Isa::avx_vnni, Isa::avx512,
                                   Isa::avx512_bf16, Isa::amx,    Isa::neon, Isa::neon_i8mm};

const char* name_of(Isa isa);

// Whether this machine reads rows of weights faster one by one than four side by side (rows.inc). Only tests set it.
extern bool reads_one_stream;

// Whether the kernels are compiled in and this machine supports them.
bool is_available(Isa isa);

}  // namespace slm
