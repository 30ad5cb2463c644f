// Instruction sets: which this build has, and which this machine can run. Included by files of every instruction set,
// so it defines no functions and includes none (see simd/README.md).
#pragma once

namespace slm {

enum class Isa { scalar, avx2, avx_vnni, avx512, avx512_bf16, amx, neon, neon_i8mm };

// The best last.
inline constexpr Isa all_isas[] = {Isa::scalar,      Isa::avx2, Isa::avx_vnni, Isa::avx512,
                                   Isa::avx512_bf16, Isa::amx,  Isa::neon,     Isa::neon_i8mm};

const char* name_of(Isa isa);

// Compiled in, and this machine has it.
bool is_available(Isa isa);

}  // namespace slm
