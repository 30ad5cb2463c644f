// The products of kernels_amx.cpp, with tiles in AVX-512 (Isa::amx_plain).
#define SLM_PLAIN_TILES
#include "matmul/kernels_amx.cpp"
