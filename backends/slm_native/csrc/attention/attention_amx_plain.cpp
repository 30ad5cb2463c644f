// The attention of attention_amx.cpp, with tiles in AVX-512 (Isa::amx_plain).
#define SLM_PLAIN_TILES
#include "attention/attention_amx.cpp"
