// C entry point of paged attention.
#include "attention.h"

extern "C" void ssd_attention(const float* q, const float* k_cache, const float* v_cache,
                              const Heads* heads, const Batch* batch, float scale, float* out,
                              int threads) {
    parallel(threads, [&](int part, int parts) {
        attention_part(q, k_cache, v_cache, *heads, *batch, scale, out, part, parts);
    });
}
