// Instruction sets: which this build has, and which this machine can run. Included by files of every instruction set,
// so it defines no functions and includes none (see simd/README.md).
//
// amx_plain gives AMX's numbers on any machine with AVX-512: the kernels of AMX, with products of tiles in AVX-512. It is
// for tests.
#pragma once

namespace slm {

enum class Isa { amx_plain, scalar, avx2, avx_vnni, avx512, avx512_bf16, amx, neon, neon_i8mm };

// The best last. amx_plain is first: no machine chooses it by itself.
inline constexpr Isa all_isas[] = {Isa::amx_plain,   Isa::scalar, Isa::avx2, Isa::avx_vnni, Isa::avx512,
                                   Isa::avx512_bf16, Isa::amx,    Isa::neon, Isa::neon_i8mm};

const char* name_of(Isa isa);

// Compiled in, and this machine has it.
bool is_available(Isa isa);

}  // namespace slm
