// The attention of attention_amx.cpp, with tiles in plain C++.
#define SLM_PLAIN_TILES
#include "attention_amx.cpp"
