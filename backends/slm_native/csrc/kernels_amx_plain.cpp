// The products of kernels_amx.cpp, with tiles in AVX-512 (Isa::amx_plain).
#define SLM_PLAIN_TILES
#include "kernels_amx.cpp"
