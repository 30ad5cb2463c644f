// The products of kernels_amx.cpp, with tiles in plain C++.
#define SLM_PLAIN_TILES
#include "kernels_amx.cpp"
