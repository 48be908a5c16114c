/* One operation on 32 lanes, for the lanes of a mask. Names: k_<operation>_<kind>, kinds as in isa.py.
 *
 * The results have the bits that lanes.py and numpy_alu.py define. Where a float operation meets two NaN or two
 * zeros of different sign, the choice is that of NumPy's vector loops. Destinations may be sources.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#else
#include <fenv.h>
#endif

#define LANES _Pragma("GCC ivdep") for (int i = 0; i < 32; i++)
#define K1(name, D, A, e)                                                                   \
    void k_##name(D *d, const A *pa, uint32_t mask) {                                       \
        if (mask == ~0u) {                                                                  \
            LANES { A a = pa[i]; d[i] = (D)(e); }                                           \
        } else {                                                                            \
            LANES { A a = pa[i]; D r = (D)(e); d[i] = mask >> i & 1 ? r : d[i]; }           \
        }                                                                                   \
    }
#define K2(name, D, A, B, e)                                                                \
    void k_##name(D *d, const A *pa, const B *pb, uint32_t mask) {                          \
        if (mask == ~0u) {                                                                  \
            LANES { A a = pa[i]; B b = pb[i]; d[i] = (D)(e); }                              \
        } else {                                                                            \
            LANES { A a = pa[i]; B b = pb[i]; D r = (D)(e); d[i] = mask >> i & 1 ? r : d[i]; } \
        }                                                                                   \
    }
#define K3(name, D, A, B, C, e)                                                             \
    void k_##name(D *d, const A *pa, const B *pb, const C *pc, uint32_t mask) {             \
        if (mask == ~0u) {                                                                  \
            LANES { A a = pa[i]; B b = pb[i]; C c = pc[i]; d[i] = (D)(e); }                 \
        } else {                                                                            \
            LANES { A a = pa[i]; B b = pb[i]; C c = pc[i]; D r = (D)(e); d[i] = mask >> i & 1 ? r : d[i]; } \
        }                                                                                   \
    }

typedef uint16_t h;
typedef int16_t s;
typedef uint32_t u;
typedef int32_t i_;
typedef uint64_t q;
typedef int64_t l;

/* -- moves */

K1(copy_h, h, h, a)
K1(copy_u, u, u, a)
K1(copy_q, q, q, a)

void k_splat_u(u *d, u value, uint32_t mask) { LANES d[i] = mask >> i & 1 ? value : d[i]; }
void k_splat_h(h *d, u value, uint32_t mask) { LANES d[i] = mask >> i & 1 ? (h)value : d[i]; }
void k_splat_q(q *d, q value, uint32_t mask) { LANES d[i] = mask >> i & 1 ? value : d[i]; }

K2(pack_QW, q, u, u, (q)b << 32 | a)
K2(pack_WH, u, h, h, (u)b << 16 | a)
K1(low_QW, u, q, a)
K1(high_QW, u, q, a >> 32)
K1(low_WH, h, u, a)
K1(high_WH, h, u, a >> 16)
void k_pack_QH(q *d, const h *p0, const h *p1, const h *p2, const h *p3, uint32_t mask) {
    LANES {
        q r = (q)p3[i] << 48 | (q)p2[i] << 32 | (q)p1[i] << 16 | p0[i];
        d[i] = mask >> i & 1 ? r : d[i];
    }
}
K1(part1_QH, h, q, a >> 16)
K1(part0_QH, h, q, a)
K1(part2_QH, h, q, a >> 32)
K1(part3_QH, h, q, a >> 48)

/* -- integers */

#define SIGNLESS(K)                                                                         \
    K2(add_##K, K, K, K, a + b) K2(sub_##K, K, K, K, a - b) K2(mul_##K, K, K, K, (q)a * b)  \
    K2(and_##K, K, K, K, a & b) K2(or_##K, K, K, K, a | b) K2(xor_##K, K, K, K, a ^ b)      \
    K1(not_##K, K, K, ~a) K1(cnot_##K, K, K, a == 0) K1(neg_##K, K, K, 0 - a)               \
    K3(mad_##K, K, K, K, K, (q)a * b + c)                                                   \
    void k_selp_##K(K *d, const K *pa, const K *pb, uint32_t p, uint32_t mask) {            \
        uint32_t pick = p;                                                                  \
        if (mask == ~0u) {                                                                  \
            LANES { K a = pa[i], b = pb[i]; d[i] = pick >> i & 1 ? a : b; }                 \
        } else {                                                                            \
            LANES { K a = pa[i], b = pb[i], r = pick >> i & 1 ? a : b; d[i] = mask >> i & 1 ? r : d[i]; } \
        }                                                                                   \
    }
SIGNLESS(h) SIGNLESS(u) SIGNLESS(q)

#define MINMAX(N, T) K2(min_##N, T, T, T, a < b ? a : b) K2(max_##N, T, T, T, a > b ? a : b)
K2(min_relu_i, i_, i_, i_, (a < b ? a : b) > 0 ? (a < b ? a : b) : 0)
K2(max_relu_i, i_, i_, i_, (a > b ? a : b) > 0 ? (a > b ? a : b) : 0)
MINMAX(h, h) MINMAX(s, s) MINMAX(u, u) MINMAX(i, i_) MINMAX(q, q) MINMAX(l, l)

K1(abs_s, s, s, a < 0 ? (h)(0 - (h)a) : a)
K1(abs_i, i_, i_, a < 0 ? 0 - (u)a : (u)a)
K1(abs_l, l, l, a < 0 ? 0 - (q)a : (q)a)

K2(mulhi_h, h, h, h, (u)a * b >> 16)
K2(mulhi_s, s, s, s, (i_)a * b >> 16)
K2(mulhi_u, u, u, u, (q)a * b >> 32)
K2(mulhi_i, i_, i_, i_, (l)a * b >> 32)
K2(mulhi_q, q, q, q, (unsigned __int128)a * b >> 64)
K2(mulhi_l, l, l, l, (__int128)a * b >> 64)
K2(mulwide_h, u, h, h, (u)a * b)
K2(mulwide_s, i_, s, s, (i_)a * b)
K2(mulwide_u, q, u, u, (q)a * b)
K2(mulwide_i, l, i_, i_, (l)a * b)
K3(madhi_h, h, h, h, h, ((u)a * b >> 16) + c)
K3(madhi_s, h, s, s, h, ((i_)a * b >> 16) + c)
K3(madhi_u, u, u, u, u, ((q)a * b >> 32) + c)
K3(madhi_i, u, i_, i_, u, (u)((l)a * b >> 32) + c)
K3(madwide_h, u, h, h, u, (u)a * b + c)
K3(madwide_s, u, s, s, u, (u)((i_)a * b) + c)
K3(madwide_u, q, u, u, q, (q)a * b + c)
K3(madwide_i, q, i_, i_, q, (q)((l)a * b) + c)

/* division by zero: all ones, the remainder is the dividend; the smallest number over -1 wraps */
#define DIVIDE(N, T, W)                                                                     \
    K2(div_##N, T, T, T, b == 0 ? (T)-1 : (T)((W)a / (W)b))                                 \
    K2(rem_##N, T, T, T, b == 0 ? a : (T)((W)a % (W)b))
DIVIDE(h, h, u) DIVIDE(s, s, i_) DIVIDE(u, u, u) DIVIDE(i, i_, l) DIVIDE(q, q, q) DIVIDE(l, l, __int128)

#define SHIFTS(K, S, N, bits)                                                               \
    K2(shl_##K, K, K, u, b < bits ? (K)(a << (b & (bits - 1))) : (K)0)                      \
    K2(shr_##K, K, K, u, b < bits ? (K)(a >> (b & (bits - 1))) : (K)0)                      \
    K2(shr_##N, S, S, u, (S)(a >> (b < bits ? b : bits - 1)))
SHIFTS(h, s, s, 16) SHIFTS(u, i_, i, 32) SHIFTS(q, l, l, 64)

#define PAIR ((q)b << 32 | a)
K3(shf_l_wrap, u, u, u, u, PAIR << (c & 31) >> 32)
K3(shf_r_wrap, u, u, u, u, PAIR >> (c & 31))
K3(shf_l_clamp, u, u, u, u, PAIR << (c < 32 ? c : 32) >> 32)
K3(shf_r_clamp, u, u, u, u, PAIR >> (c < 32 ? c : 32))

static inline q extract(q x, u position, u length, int bits, int is_signed) {
    q ones = bits == 64 ? ~0ull : (1ull << bits) - 1;
    u p = position & 255, n = length & 255;
    q value = p < (u)bits ? (x & ones) >> p : 0;
    if (n < (u)bits) value &= (1ull << n) - 1;
    if (is_signed && n) {
        u top = p + n - 1 < (u)bits - 1 ? p + n - 1 : (u)bits - 1;
        if (x >> top & 1) {
            u width = top + 1 > p ? top + 1 - p : 0;
            value |= ones & ~(width >= 64 ? ~0ull : (1ull << width) - 1);
        }
    }
    return value;
}
K3(bfe_u, u, u, u, u, extract(a, b, c, 32, 0))
K3(bfe_i, u, u, u, u, extract(a, b, c, 32, 1))
K3(bfe_q, q, q, u, u, extract(a, b, c, 64, 0))
K3(bfe_l, q, q, u, u, extract(a, b, c, 64, 1))

static inline q insert(q x, q y, u position, u length, int bits) {
    u p = position & 255, n = length & 255;
    if (p >= (u)bits) return y;
    q mask = (n >= 64 ? ~0ull : (1ull << n) - 1) << p;
    return (y & ~mask) | (x << p & mask);
}
#define BFI(K, bits)                                                                        \
    void k_bfi_##K(K *d, const K *pa, const K *pb, const u *pc, const u *pe, uint32_t mask) { \
        LANES {                                                                             \
            K r = (K)insert(pa[i], pb[i], pc[i], pe[i], bits);                              \
            d[i] = mask >> i & 1 ? r : d[i];                                                \
        }                                                                                   \
    }
BFI(u, 32) BFI(q, 64)

static inline u permute(u a, u b, u selector) {
    q source = (q)b << 32 | a;
    u r = 0;
    for (int k = 0; k < 4; k++) {
        u nibble = selector >> 4 * k & 15, byte = (u)(source >> 8 * (nibble & 7)) & 255;
        if (nibble & 8) byte = byte & 128 ? 255 : 0;
        r |= byte << 8 * k;
    }
    return r;
}
K3(prmt, u, u, u, u, permute(a, b, c))

K1(popc_u, u, u, __builtin_popcount(a))
K1(popc_q, u, q, __builtin_popcountll(a))
K1(clz_u, u, u, a ? __builtin_clz(a) : 32)
K1(clz_q, u, q, a ? __builtin_clzll(a) : 64)
K1(bfind_u, u, u, a ? 31 - __builtin_clz(a) : -1)
K1(bfind_i, u, i_, (a < 0 ? ~a : a) ? 31 - __builtin_clz((u)(a < 0 ? ~a : a)) : -1)
K1(bfind_q, u, q, a ? 63 - __builtin_clzll(a) : -1)
K1(bfind_l, u, l, (a < 0 ? ~a : a) ? 63 - __builtin_clzll((q)(a < 0 ? ~a : a)) : -1)

static inline u reverse(u x) {
    x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
    x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
    x = (x >> 4 & 0x0F0F0F0F) | (x & 0x0F0F0F0F) << 4;
    return __builtin_bswap32(x);
}
K1(brev_u, u, u, reverse(a))

void k_lop3(u *d, const u *pa, const u *pb, const u *pc, uint32_t table, uint32_t mask) {
    LANES {
        u a = pa[i], b = pb[i], c = pc[i], r = 0;
        for (u k = 0; k < 8; k++)
            r |= -(table >> k & 1) & (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
        d[i] = mask >> i & 1 ? r : d[i];
    }
}

/* -- comparisons: bits of a predicate */

#define SETP(name, T, e)                                                                    \
    uint32_t k_setp_##name(const T *pa, const T *pb) {                                      \
        uint32_t r = 0;                                                                     \
        LANES { T a = pa[i], b = pb[i]; r |= (uint32_t)(e) << i; }                          \
        return r;                                                                           \
    }
#define COMPARE(N, T)                                                                       \
    SETP(eq_##N, T, a == b) SETP(ne_##N, T, a != b) SETP(lt_##N, T, a < b)                  \
    SETP(le_##N, T, a <= b) SETP(gt_##N, T, a > b) SETP(ge_##N, T, a >= b)
COMPARE(h, h) COMPARE(s, s) COMPARE(u, u) COMPARE(i, i_) COMPARE(q, q) COMPARE(l, l)
#define UNORDERED (a != a || b != b)
#define FLOAT_COMPARE(N, T)                                                                 \
    SETP(eq_##N, T, a == b) SETP(ne_##N, T, a < b || a > b) SETP(lt_##N, T, a < b)          \
    SETP(le_##N, T, a <= b) SETP(gt_##N, T, a > b) SETP(ge_##N, T, a >= b)                  \
    SETP(equ_##N, T, a == b || UNORDERED) SETP(neu_##N, T, a != b)                          \
    SETP(ltu_##N, T, !(a >= b)) SETP(leu_##N, T, !(a > b)) SETP(gtu_##N, T, !(a <= b))      \
    SETP(geu_##N, T, !(a < b)) SETP(num_##N, T, !UNORDERED) SETP(nan_##N, T, UNORDERED)
FLOAT_COMPARE(f, float) FLOAT_COMPARE(d, double)

/* -- floats */

static inline u bits_of(float x) { u r; memcpy(&r, &x, 4); return r; }
static inline float float_of(u x) { float r; memcpy(&r, &x, 4); return r; }
static inline float flush(float x) { return fabsf(x) < 0x1p-126f ? float_of(bits_of(x) & 0x80000000u) : x; }
static inline float saturate(float x) { float r = x > 0.0f ? x : 0.0f; return r < 1.0f ? r : 1.0f; }

#define ARITHMETIC2(name, e)                                                                \
    K2(name##_f, float, float, float, e) K2(name##_sat_f, float, float, float, saturate(e)) \
    static inline float flushed_##name(float a, float b) { return flush(e); }               \
    K2(name##_ftz_f, float, float, float, flushed_##name(flush(a), flush(b)))               \
    K2(name##_ftz_sat_f, float, float, float, saturate(flushed_##name(flush(a), flush(b)))) \
    K2(name##_d, double, double, double, e)
ARITHMETIC2(add_rn, a + b)
ARITHMETIC2(sub_rn, a - b)
ARITHMETIC2(mul_rn, a * b)
#define FMA(a, b, c) __builtin_fmaf(a, b, c)
K3(fma_rn_f, float, float, float, float, FMA(a, b, c))
K3(fma_rn_sat_f, float, float, float, float, saturate(FMA(a, b, c)))
K3(fma_rn_ftz_f, float, float, float, float, flush(FMA(flush(a), flush(b), flush(c))))
K3(fma_rn_ftz_sat_f, float, float, float, float, saturate(flush(FMA(flush(a), flush(b), flush(c)))))

/* Directed rounding: AVX-512 has it in the instruction; elsewhere the control register is set for 32 lanes. */
#ifdef __AVX512F__
#define DIRECTED_LOOP(load, operation)                                                      \
    for (int k = 0; k < 32; k += 16) {                                                      \
        load;                                                                               \
        _mm512_mask_storeu_ps(d + k, (__mmask16)(mask >> k), operation);                    \
    }
#define LOAD2 __m512 a = _mm512_loadu_ps(pa + k), b = _mm512_loadu_ps(pb + k)
#define DIRECTED(mode, control)                                                             \
    void k_add_##mode##_f(float *d, const float *pa, const float *pb, uint32_t mask) {      \
        DIRECTED_LOOP(LOAD2, _mm512_add_round_ps(a, b, control | _MM_FROUND_NO_EXC)) }      \
    void k_sub_##mode##_f(float *d, const float *pa, const float *pb, uint32_t mask) {      \
        DIRECTED_LOOP(LOAD2, _mm512_sub_round_ps(a, b, control | _MM_FROUND_NO_EXC)) }      \
    void k_mul_##mode##_f(float *d, const float *pa, const float *pb, uint32_t mask) {      \
        DIRECTED_LOOP(LOAD2, _mm512_mul_round_ps(a, b, control | _MM_FROUND_NO_EXC)) }      \
    void k_fma_##mode##_f(float *d, const float *pa, const float *pb, const float *pc, uint32_t mask) { \
        DIRECTED_LOOP(LOAD2; __m512 c = _mm512_loadu_ps(pc + k),                            \
                      _mm512_fmadd_round_ps(a, b, c, control | _MM_FROUND_NO_EXC)) }
DIRECTED(rm, _MM_FROUND_TO_NEG_INF)
DIRECTED(rp, _MM_FROUND_TO_POS_INF)
DIRECTED(rz, _MM_FROUND_TO_ZERO)
#else
#define IN_MODE(control, T, e)                                                              \
    volatile float r[32];                                                                   \
    fesetround(control);                                                                    \
    for (int i = 0; i < 32; i++) { volatile float a = pa[i], b = pb[i]; r[i] = e; }         \
    fesetround(FE_TONEAREST);                                                               \
    LANES d[i] = mask >> i & 1 ? r[i] : d[i];
#define DIRECTED(mode, control)                                                             \
    void k_add_##mode##_f(float *d, const float *pa, const float *pb, uint32_t mask) { IN_MODE(control, float, a + b) } \
    void k_sub_##mode##_f(float *d, const float *pa, const float *pb, uint32_t mask) { IN_MODE(control, float, a - b) } \
    void k_mul_##mode##_f(float *d, const float *pa, const float *pb, uint32_t mask) { IN_MODE(control, float, a * b) } \
    void k_fma_##mode##_f(float *d, const float *pa, const float *pb, const float *pc, uint32_t mask) { \
        IN_MODE(control, float, fmaf(a, b, pc[i])) }
DIRECTED(rm, FE_DOWNWARD)
DIRECTED(rp, FE_UPWARD)
DIRECTED(rz, FE_TOWARDZERO)
#endif

#define FLUSHED2(name)                                                                      \
    void k_##name##_ftz_f(float *d, const float *pa, const float *pb, uint32_t mask) {      \
        float a[32], b[32], r[32];                                                          \
        LANES { a[i] = flush(pa[i]); b[i] = flush(pb[i]); }                                 \
        k_##name##_f(r, a, b, ~0u);                                                         \
        LANES { float x = flush(r[i]); d[i] = mask >> i & 1 ? x : d[i]; }                   \
    }
#define FLUSHED(mode)                                                                       \
    FLUSHED2(add_##mode) FLUSHED2(sub_##mode) FLUSHED2(mul_##mode)                          \
    void k_fma_##mode##_ftz_f(float *d, const float *pa, const float *pb, const float *pc, uint32_t mask) { \
        float a[32], b[32], c[32], r[32];                                                   \
        LANES { a[i] = flush(pa[i]); b[i] = flush(pb[i]); c[i] = flush(pc[i]); }            \
        k_fma_##mode##_f(r, a, b, c, ~0u);                                                  \
        LANES { float x = flush(r[i]); d[i] = mask >> i & 1 ? x : d[i]; }                   \
    }
FLUSHED(rm) FLUSHED(rp) FLUSHED(rz)

/* numbers win over NaN, or with `nan` a NaN wins */
static inline float largest(float a, float b) { return a > b || b != b ? a : b; }
static inline float smallest(float a, float b) { return a < b || b != b ? a : b; }
static inline float largest_nan(float a, float b) { return a > b || a != a ? a : b; }
static inline float smallest_nan(float a, float b) { return a < b || a != a ? a : b; }
#define EXTREMUM(name, function)                                                            \
    K2(name##_f, float, float, float, function(a, b))                                       \
    K3(name##3_f, float, float, float, float, function(function(a, b), c))                  \
    K2(name##_ftz_f, float, float, float, flush(function(flush(a), flush(b))))              \
    K3(name##3_ftz_f, float, float, float, float, flush(function(function(flush(a), flush(b)), flush(c))))
EXTREMUM(max, largest) EXTREMUM(min, smallest) EXTREMUM(maxnan, largest_nan) EXTREMUM(minnan, smallest_nan)

K1(abs_f, float, float, float_of(bits_of(a) & 0x7FFFFFFFu))
K1(neg_f, float, float, float_of(bits_of(a) ^ 0x80000000u))
K1(abs_ftz_f, float, float, fabsf(flush(a)))
K1(neg_ftz_f, float, float, -flush(a))
K1(abs_d, double, double, fabs(a))
K1(neg_d, double, double, -a)
K2(copysign_f, float, float, float, copysignf(b, a))

#define ROOT(name, e)                                                                       \
    static inline float plain_##name(float x) { double a = x; return (float)(e); }          \
    K1(name##_f, float, float, plain_##name(a))                                             \
    K1(name##_ftz_f, float, float, flush(plain_##name(flush(a))))
ROOT(rcp, 1.0 / a)
ROOT(rsqrt, 1.0 / sqrt(a))
ROOT(sqrt, sqrt(a))
K2(div_f, float, float, float, a / b)
K2(div_ftz_f, float, float, float, flush(flush(a) / flush(b)))

#define TESTP(name, e)                                                                      \
    uint32_t k_testp_##name(const float *pa) {                                              \
        uint32_t r = 0;                                                                     \
        LANES { float a = pa[i], x = fabsf(a); (void)a; (void)x; r |= (uint32_t)(e) << i; } \
        return r;                                                                           \
    }
TESTP(finite, x < INFINITY)
TESTP(infinite, x == INFINITY)
TESTP(number, a == a)
TESTP(notanumber, a != a)
TESTP(normal, x < INFINITY && x >= 0x1p-126f)
TESTP(subnormal, x < 0x1p-126f && x != 0)

/* 2**x rounded once: a polynomial in double, and long double where its error could change the rounding. */
static float exact_ex2(float x) { return (float)exp2l((long double)x); }

/* ln(2)**n / n! */
#define HORNER(f)                                                                           \
    STEP(STEP(STEP(STEP(STEP(STEP(STEP(STEP(STEP(STEP(STEP(                                 \
        4.4455382718708114976e-10, f, 7.0549116208011233299e-9), f, 1.0178086009239699727e-7), \
        f, 1.3215486790144309488e-6), f, 0.00001525273380405984028), f, 0.00015403530393381609954), \
        f, 0.0013333558146428443423), f, 0.009618129107628477162), f, 0.055504108664821579953), \
        f, 0.24022650695910071233), f, 0.69314718055994530942), f, 1.0)
#define STEP(p, f, c) __builtin_fma(p, f, c)

/* Within 512 units of half way between two floats, or subnormal, where their grid is coarser. */
static inline int doubtful(l word, float x) {
    q low = ((q)word & 0x1FFFFFFF) - (0x10000000 - 512);
    return (low < 1024) | ((x < -126.0f) & (x > -152.0f));
}

static void ex2(float *y, const float *x) {
    l word[32];
    int any = 0;
    LANES {
        double v = x[i];
        v = v < -200.0 ? -200.0 : v;
        v = v > 200.0 ? 200.0 : v;
        double k = rint(v), f = v - k, p = HORNER(f);
        l w;
        memcpy(&w, &p, 8);
        word[i] = w + ((l)k << 52);
    }
    LANES any |= doubtful(word[i], x[i]);
    LANES {
        double r;
        memcpy(&r, &word[i], 8);
        y[i] = x[i] != x[i] ? x[i] : (float)r;
    }
    if (!any) return;
    for (int i = 0; i < 32; i++)
        if (doubtful(word[i], x[i])) y[i] = exact_ex2(x[i]);
}
void k_ex2_f(float *d, const float *pa, uint32_t mask) {
    float y[32];
    ex2(y, pa);
    LANES d[i] = mask >> i & 1 ? y[i] : d[i];
}
void k_ex2_ftz_f(float *d, const float *pa, uint32_t mask) {
    float y[32];
    ex2(y, pa);
    LANES { float r = y[i] < 0x1p-126f ? 0.0f : y[i]; d[i] = mask >> i & 1 ? r : d[i]; }
}

/* log2 rounded once: glibc's double is within a unit, long double decides where that could change the rounding. */
static float lg2(float x) {
    double y = log2((double)x);
    q word;
    memcpy(&word, &y, 8);
    return (word & 0x1FFFFFFF) - (0x10000000 - 64) < 128 ? (float)log2l((long double)x) : (float)y;
}
void k_lg2_f(float *d, const float *pa, uint32_t mask) {
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) d[i] = lg2(pa[i]);
}
void k_lg2_ftz_f(float *d, const float *pa, uint32_t mask) {
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) d[i] = flush(lg2(flush(pa[i])));
}

/* -- conversions */

#define WIDTHS(of, A) K1(cvt_##of##_16, h, A, a) K1(cvt_##of##_32, u, A, a) K1(cvt_##of##_64, q, A, (l)a)
K1(cvt_u16_16, h, h, a) K1(cvt_u16_32, u, h, a) K1(cvt_u16_64, q, h, a)
WIDTHS(s16, s)
K1(cvt_u32_16, h, u, a) K1(cvt_u32_32, u, u, a) K1(cvt_u32_64, q, u, a)
WIDTHS(s32, i_)
K1(cvt_u64_16, h, q, a) K1(cvt_u64_32, u, q, a) K1(cvt_u64_64, q, q, a)
WIDTHS(s64, l)
/* 8 bits in the low part of a register of kind K */
#define BYTES(K)                                                                            \
    K1(cvt_u8##K##_16, h, K, (uint8_t)a) K1(cvt_u8##K##_32, u, K, (uint8_t)a) K1(cvt_u8##K##_64, q, K, (uint8_t)a) \
    K1(cvt_s8##K##_16, h, K, (int8_t)a) K1(cvt_s8##K##_32, u, K, (i_)(int8_t)a) K1(cvt_s8##K##_64, q, K, (l)(int8_t)a)
BYTES(h) BYTES(u) BYTES(q)

/* NaN gives 0, the rest saturates; bounds are exact in double */
static inline l to_signed(double x, double low, double high, l least, l most) {
    return x != x ? 0 : x >= high ? most : x <= low ? least : (l)x;
}
static inline q to_unsigned(double x, double high, q most) { return !(x > 0) ? 0 : x >= high ? most : (q)x; }
#define TO_INTEGER(mode, round)                                                             \
    K1(cvt_##mode##_s32, i_, float, to_signed(round((double)a), -0x1p31, 0x1p31 - 1, INT32_MIN, INT32_MAX)) \
    K1(cvt_##mode##_u32, u, float, to_unsigned(round((double)a), 0x1p32 - 1, UINT32_MAX))   \
    K1(cvt_##mode##_s64, l, float, to_signed(round((double)a), -0x1p63, 0x1p63, INT64_MIN, INT64_MAX)) \
    K1(cvt_##mode##_u64, q, float, to_unsigned(round((double)a), 0x1p64, UINT64_MAX))       \
    K1(cvt_##mode##_f32, float, float, round##f(a))                                         \
    K1(cvt_##mode##_ftz_f32, float, float, flush(round##f(flush(a))))
TO_INTEGER(rni, rint) TO_INTEGER(rzi, trunc) TO_INTEGER(rmi, floor) TO_INTEGER(rpi, ceil)
K1(cvt_f32_s16, float, s, a)
K1(cvt_f32_u16, float, h, a)
K1(cvt_f32_s32, float, i_, a)
K1(cvt_f32_u32, float, u, a)
K1(cvt_f32_s64, float, l, a)
K1(cvt_f32_u64, float, q, a)
K1(cvt_f64_s32, double, i_, a)
K1(cvt_f64_u32, double, u, a)
K1(cvt_f64_f32, double, float, a)
K1(cvt_f32_f64, float, double, a)
K1(cvt_ftz_f32, float, float, flush(a))

static inline u bf16_rn(float x) {
    u b = bits_of(x), r = (b + ((b >> 16 & 1) + 0x7FFF)) >> 16;
    return x != x ? 0x7FFF : r;
}
static inline u bf16_rz(float x) { return x != x ? 0x7FFF : bits_of(x) >> 16; }
K1(cvt_bf16_rn, h, float, bf16_rn(a))
K1(cvt_bf16_rz, h, float, bf16_rz(a))
K2(cvt_bf16x2_rn, u, float, float, bf16_rn(a) << 16 | bf16_rn(b))
K2(cvt_bf16x2_rz, u, float, float, bf16_rz(a) << 16 | bf16_rz(b))
K1(cvt_f32_bf16, float, h, float_of((u)a << 16))
K3(fma_rn_GGf, float, h, h, float, FMA(float_of((u)a << 16), float_of((u)b << 16), c))

#ifdef __FLT16_MAX__
static inline u f16_rn(float x) {
    _Float16 y = (_Float16)x;
    h r;
    memcpy(&r, &y, 2);
    return x != x ? 0x7FFF : r;
}
static inline float f16_of(h x) { _Float16 y; memcpy(&y, &x, 2); return (float)y; }
K1(cvt_f16_rn, h, float, f16_rn(a))
K2(cvt_f16x2_rn, u, float, float, f16_rn(a) << 16 | f16_rn(b))
K1(cvt_f32_f16, float, h, f16_of(a))
K3(fma_rn_FFf, float, h, h, float, FMA(f16_of(a), f16_of(b), c))
#endif
