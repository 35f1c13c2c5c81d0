// Eight-lane vectors, by GCC/Clang vector extensions (AVX2 on x86, two NEON registers on aarch64),
// and the float functions the kernels need. Every function is elementwise and deterministic.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SSD_INLINE inline __attribute__((always_inline))

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint64_t u64x4 __attribute__((vector_size(32)));

// Lanes of a (0-7) and b (8-15), in the order given.
#if defined(__clang__)
#define SSD_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SSD_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, i32x8{__VA_ARGS__})
#endif

static SSD_INLINE f32x8 splat(float v) { return f32x8{v, v, v, v, v, v, v, v}; }

static SSD_INLINE f32x8 load8(const float* p) {
    f32x8 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

static SSD_INLINE void store8(float* p, f32x8 v) { std::memcpy(p, &v, sizeof v); }

static SSD_INLINE u32x8 load_bits8(const void* p) {
    u32x8 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// a * b + c, rounded once where the machine can (always the same instruction, whoever calls).
static SSD_INLINE f32x8 fma8(f32x8 a, f32x8 b, f32x8 c) {
#if defined(__FMA__)
    return (f32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    f32x8 r;
    for (int i = 0; i < 8; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#endif
}

static SSD_INLINE f32x8 select8(i32x8 mask, f32x8 a, f32x8 b) {
    return (f32x8)(((i32x8)a & mask) | ((i32x8)b & ~mask));
}

// a where it is the larger one, else b: also where either is NaN.
static SSD_INLINE f32x8 max8(f32x8 a, f32x8 b) { return a > b ? a : b; }

static SSD_INLINE f32x8 min8(f32x8 a, f32x8 b) { return a < b ? a : b; }

static SSD_INLINE u32x8 min8(u32x8 a, u32x8 b) { return a < b ? a : b; }

// AVX2 multiplies 32 bits, but not 64. `low_product4` is the product of a's lower halves and b's,
// `crossed4` that of each half of a and the other half of b, cut to 32 bits.
#if defined(__AVX2__) && !(defined(__AVX512DQ__) && defined(__AVX512VL__))
#define SSD_MULTIPLY_BY_HALVES

static SSD_INLINE u64x4 low_product4(u64x4 a, uint64_t b) {
    return (u64x4)_mm256_mul_epu32((__m256i)a, (__m256i)u64x4{b, b, b, b});
}

static SSD_INLINE u64x4 crossed4(u64x4 a, uint64_t b) {
    const uint64_t swapped = b << 32 | b >> 32;
    return (u64x4)((u32x8)a * (u32x8)u64x4{swapped, swapped, swapped, swapped});
}
#endif

// a * b modulo 2^64.
static SSD_INLINE u64x4 product4(u64x4 a, uint64_t b) {
#if defined(SSD_MULTIPLY_BY_HALVES)
    const u64x4 cross = crossed4(a, b);
    return low_product4(a, b) + ((cross + (cross << 32)) & ~(uint64_t)0xffffffff);
#else
    return a * b;
#endif
}

// Lower (0) or upper (1) halves of a0 a1 b0 b1 a2 a3 b2 b3: one instruction, unlike a0-a3 b0-b3.
template <int half>
static SSD_INLINE u32x8 halves8(u64x4 a, u64x4 b) {
    return (u32x8)SSD_SHUFFLE((f32x8)a, (f32x8)b, half, 2 + half, 8 + half, 10 + half, 4 + half,
                              6 + half, 12 + half, 14 + half);
}

// Upper halves of the products modulo 2^64 of c and a0 a1 b0 b1 a2 a3 b2 b3.
static SSD_INLINE u32x8 upper_products8(u64x4 a, u64x4 b, uint64_t c) {
#if defined(SSD_MULTIPLY_BY_HALVES)
    const u64x4 x = crossed4(a, c), y = crossed4(b, c);
    return halves8<0>(x, y) + halves8<1>(x, y) + halves8<1>(low_product4(a, c), low_product4(b, c));
#else
    return halves8<1>(a * c, b * c);
#endif
}

// Bit j: lane j of a mask.
static SSD_INLINE unsigned lanes8(i32x8 mask) {
#if defined(__AVX__)
    return (unsigned)_mm256_movemask_ps((__m256)mask);
#else
    unsigned r = 0;
    for (int i = 0; i < 8; i++) r |= (unsigned)(mask[i] & 1) << i;
    return r;
#endif
}

static SSD_INLINE bool any8(i32x8 mask) {
#if defined(__AVX__)
    return lanes8(mask) != 0;
#else
    int r = 0;
    for (int i = 0; i < 8; i++) r |= mask[i];
    return r != 0;
#endif
}

static SSD_INLINE float sum8(f32x8 v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// Sums of eight vectors, one a lane, each by the same tree.
static SSD_INLINE f32x8 sums_of8(const f32x8 (&v)[8]) {
    f32x8 pair[4], quad[2];
    for (int i = 0; i < 4; i++)
        pair[i] = SSD_SHUFFLE(v[2 * i], v[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
                  SSD_SHUFFLE(v[2 * i], v[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    for (int i = 0; i < 2; i++)
        quad[i] = SSD_SHUFFLE(pair[2 * i], pair[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                  SSD_SHUFFLE(pair[2 * i], pair[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return SSD_SHUFFLE(quad[0], quad[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           SSD_SHUFFLE(quad[0], quad[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

static SSD_INLINE float maximum8(f32x8 v) {
    float m = v[0];
    for (int i = 1; i < 8; i++) m = v[i] > m ? v[i] : m;
    return m;
}

static SSD_INLINE float bf16_to_f32(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

// Eight consecutive bf16 values, widened exactly.
static SSD_INLINE f32x8 load_bf16x8(const uint16_t* p) {
    typedef uint16_t u16x8 __attribute__((vector_size(16)));
    u16x8 h;
    std::memcpy(&h, p, sizeof h);
    return (f32x8)(__builtin_convertvector(h, u32x8) << 16);
}

// Natural logarithm of positive normal floats, about 1 ulp, also near 1.
static SSD_INLINE f32x8 log8(f32x8 x) {
    i32x8 e = ((i32x8)x - 0x3f3504f3) >> 23;  // x = 2^e m, m in [sqrt(1/2), sqrt(2))
    f32x8 m = (f32x8)((i32x8)x - (e << 23));
    f32x8 n = __builtin_convertvector(e, f32x8);
    f32x8 f = m - 1.0f;
    f32x8 p = splat(0.0674660131f);  // minimax of (log(1+f) - f + f^2/2) / f^3
    p = fma8(p, f, splat(-0.116756409f));
    p = fma8(p, f, splat(0.118881747f));
    p = fma8(p, f, splat(-0.124055915f));
    p = fma8(p, f, splat(0.142195508f));
    p = fma8(p, f, splat(-0.166679963f));
    p = fma8(p, f, splat(0.200021192f));
    p = fma8(p, f, splat(-0.250000089f));
    p = fma8(p, f, splat(0.333333135f));
    f32x8 f2 = f * f;
    f32x8 tail = fma8(f2 * f, p, n * splat(-2.12194440e-4f));
    tail = fma8(splat(-0.5f), f2, tail);
    return fma8(n, splat(0.693359375f), f + tail);  // ln 2 = 0.693359375 - 2.1219444e-4
}

// -log(1 - u) for u in [2^-33, 1 - 2^-24], about 1 ulp.
static SSD_INLINE f32x8 neg_log1p_neg8(f32x8 u) {
    f32x8 y = 1.0f - u;
    f32x8 lost = (1.0f - y) - u;  // exact: y + what rounding took away = 1 - u
    return -(log8(y) + lost / y);
}

// e^x, about 1 ulp; x below -87 gives about 1e-38, x above 88 about 1e38.
static SSD_INLINE f32x8 exp8(f32x8 x) {
    x = select8(x < splat(-87.0f), splat(-87.0f), x);
    x = select8(x > splat(88.0f), splat(88.0f), x);
    const f32x8 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    f32x8 t = fma8(x, splat(1.44269504f), magic);
    f32x8 n = t - magic;
    f32x8 r = fma8(n, splat(-0.693359375f), x);
    r = fma8(n, splat(2.12194440e-4f), r);
    f32x8 p = splat(0.00138145965f);  // minimax of (e^r - 1 - r) / r^2
    p = fma8(p, r, splat(0.00836871751f));
    p = fma8(p, r, splat(0.041668389f));
    p = fma8(p, r, splat(0.166665211f));
    p = fma8(p, r, splat(0.49999994f));
    p = fma8(p, r * r, r) + 1.0f;
    return (f32x8)((i32x8)p + (((i32x8)t - (i32x8)magic) << 23));
}

static SSD_INLINE f32x8 silu8(f32x8 x) { return x / (1.0f + exp8(-x)); }
