// Packing of weights and the linear layer.
#include "gemm.h"
#include "threads.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

extern "C" {

// Advise huge pages for [p, p + bytes); harmless where there are none.
void ssd_huge_pages(void* p, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    madvise(p, (size_t)bytes, MADV_HUGEPAGE);
#else
    (void)p;
    (void)bytes;
#endif
}

// w: [n, k] row-major, rows ldw elements apart, bf16 (as uint16) or float32; out: packed panels.
void ssd_pack(const void* w, int64_t ldw, int64_t n, int64_t k, int64_t bf16, void* out,
              int threads) {
    const int64_t panels = (n + kPanel - 1) / kPanel;
    parallel(threads, [&](int part, int parts) {
        const Range range = share(panels, part, parts);
        for (int64_t p = range.begin; p < range.end; p++)
            for (int j = 0; j < kPanel; j++) {
                const int64_t row = p * kPanel + j;
                if (bf16) {
                    const uint16_t* src = (const uint16_t*)w + row * ldw;
                    uint16_t* dst = (uint16_t*)out + p * k * kPanel + (j % 8) * 2 + j / 8;
                    for (int64_t i = 0; i < k; i++) dst[i * kPanel] = row < n ? src[i] : 0;
                } else {
                    const float* src = (const float*)w + row * ldw;
                    float* dst = (float*)out + p * k * kPanel + j;
                    for (int64_t i = 0; i < k; i++) dst[i * kPanel] = row < n ? src[i] : 0.0f;
                }
            }
    });
}

// Rows of a packed [n, k] matrix, as float32: out[i] = w[index[i]], zeros where out of range.
void ssd_unpack_rows(const Packed* w, const int64_t* index, int64_t count, float* out) {
    const int64_t k = w->k;
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = index[i], p = row / kPanel;
        const int j = (int)(row % kPanel);
        float* y = out + i * k;
        if (row < 0 || row >= w->n) {
            std::memset(y, 0, sizeof(float) * k);
        } else if (w->bf16) {
            const uint16_t* src = (const uint16_t*)w->data + p * k * kPanel + (j % 8) * 2 + j / 8;
            for (int64_t c = 0; c < k; c++) y[c] = bf16_to_f32(src[c * kPanel]);
        } else {
            const float* src = (const float*)w->data + p * k * kPanel + j;
            for (int64_t c = 0; c < k; c++) y[c] = src[c * kPanel];
        }
    }
}

// y [m, n] = x [m, k] W^T (+ bias [n]) (+ residual [m, n]); ld*: elements between rows.
void ssd_linear(const Packed* w, const float* x, int64_t ldx, int64_t m, const float* bias,
                const float* residual, int64_t ldr, float* y, int64_t ldy, int threads) {
    const LinearOut out(*w, bias, residual, ldr, y, ldy);
    parallel(threads, [&](int part, int parts) {
        const Range range = share(w->panels(), part, parts);
        sweep(*w, x, ldx, m, range.begin, range.end, out);
    });
}
}
