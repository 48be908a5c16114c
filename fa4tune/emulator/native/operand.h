/* Descriptors of matrix operands and instructions. Layouts: operand.py. */
#ifndef FA4TUNE_OPERAND_H
#define FA4TUNE_OPERAND_H

#include "runtime.h"

enum { BF16 = 1, MN_MAJOR = 2, NEGATE = 4, SM100 = 8 };

typedef struct {
    int64_t start, leading, stride;
    int32_t swizzle;
} Descriptor;

static inline int decode(uint64_t bits, int sm100, Descriptor *d) {
    static const int32_t hopper[] = {0, 128, 64, 32}, blackwell[] = {0, -1, 128, -1, 64, -1, 32, -1};
    d->start = (int64_t)(bits & 0x3FFF) << 4;
    d->leading = (int64_t)(bits >> 16 & 0x3FFF) << 4;
    d->stride = (int64_t)(bits >> 32 & 0x3FFF) << 4;
    d->swizzle = sm100 ? blackwell[bits >> 61] : hopper[bits >> 62];
    if (bits >> 49 & 7) return 0;
    return !sm100 || (d->swizzle >= 0 && (bits >> 46 & 3) == 1 && !(bits >> 52 & 1));
}

/* Where 8 elements lie: 16-byte chunk c (0 or 1) of row r, or rows 8q.. of column k. */
static inline int64_t chunk_at(const Descriptor *d, int64_t relative) {
    static const uint8_t masks[] = {0, 1, 3, 3, 7};
    int64_t at = relative + d->start;
    return at ^ ((at >> 7 & masks[d->swizzle / 32]) << 4);
}

/* Rows 8q.. of column k of an operand whose rows are contiguous. */
static inline int64_t column_at(const Descriptor *d, int32_t q, int32_t k) {
    int64_t per = d->swizzle ? d->swizzle / 16 : 1;
    return chunk_at(d, d->swizzle ? q % per * 16 + q / per * d->leading + k % 8 * d->swizzle + k / 8 * d->stride
                                  : q * d->stride + k % 8 * 16 + k / 8 * d->leading);
}

/* Chunk c (0 or 1) of row r of an operand whose columns are contiguous. */
static inline int64_t row_at(const Descriptor *d, int32_t r, int32_t c) {
    return chunk_at(d, d->swizzle ? r % 8 * d->swizzle + r / 8 * d->stride + 16 * c
                                  : r % 8 * 16 + r / 8 * d->stride + c * d->leading);
}

typedef struct {
    int32_t m, n;
    int a, b; /* flags of convert() */
} Shape;

static inline int decode_instruction(uint32_t bits, Shape *s) {
    uint32_t c = bits >> 4 & 3, a = bits >> 7 & 7, b = bits >> 10 & 7;
    if (bits & 0xF || c != 1 || a > 1 || b > 1) return 0;
    s->m = (int32_t)(bits >> 24 & 31) * 16;
    s->n = (int32_t)(bits >> 17 & 63) * 8;
    s->a = (a ? BF16 : 0) | (bits >> 13 & 1 ? NEGATE : 0) | (bits >> 15 & 1 ? MN_MAJOR : 0) | SM100;
    s->b = (b ? BF16 : 0) | (bits >> 14 & 1 ? NEGATE : 0) | (bits >> 16 & 1 ? MN_MAJOR : 0) | SM100;
    return 1;
}

#endif
