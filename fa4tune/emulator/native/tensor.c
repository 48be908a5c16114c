/* Matrix operations: wgmma and tcgen05.mma. Semantics and layouts: runtime_wgmma.py, runtime_tcgen05.py, operand.py.
 *
 * Operations are recorded when they are issued. Those that continue each other on one accumulator become one
 * matrix product, computed by the BLAS that NumPy uses, with the arguments that NumPy would give it, so that the
 * sums have the same bits. What is not modelled here is performed by Python from the same records.
 */

#include <stdlib.h>
#include <time.h>

#include "checks.h"
#include "operand.h"

enum { PERFORM_WGMMA = -1, PERFORM_TENSOR = -2, QUEUE_FULL = -3 }; /* numbers of calls that Python serves */
enum { CACHE = 64, MAX_JOIN = 64, MAX_ROWS = 256, MAX_DEPTH = 16 * MAX_JOIN };

typedef struct {
    uint64_t descriptors[MAX_JOIN];
    int32_t count, rows, first, flags;
    int64_t stamp, low, end;
    float *values;
    int64_t capacity;
} Converted;

typedef struct {
    Converted entries[CACHE];
    int32_t next;
} OperandCache;

static inline float widen(uint16_t x, int bf16) {
    if (bf16) {
        uint32_t bits = (uint32_t)x << 16;
        float r;
        memcpy(&r, &bits, 4);
        return r;
    }
#ifdef __FLT16_MAX__
    _Float16 y;
    memcpy(&y, &x, 2);
    return (float)y;
#else
    uint32_t sign = (uint32_t)(x >> 15) << 31, exponent = x >> 10 & 31, fraction = x & 1023, bits;
    if (exponent == 0) {
        float r = (float)fraction * 0x1p-24f;
        return sign ? -r : r;
    }
    bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
    float r;
    memcpy(&r, &bits, 4);
    return r;
#endif
}

static inline void widen8(float *to, const uint8_t *from, int bf16, float sign) {
    uint16_t halves[8];
    memcpy(halves, from, 16);
    for (int i = 0; i < 8; i++) to[i] = sign * widen(halves[i], bf16);
}

/* Rows first..first+rows-1 and 16 columns of an operand to `to`, whose rows are `pitch` apart; 0 out of bounds. */
static int convert(const Cta *cta, const Descriptor *d, int32_t first, int32_t rows, int flags, float *to,
                   int64_t pitch, int64_t *low, int64_t *end) {
    const uint8_t *smem = cta->smem - SMEM_BASE;
    int64_t least = INT64_MAX, most = 0, limit = SMEM_BASE + cta->smem_bytes - 16;
    float sign = flags & NEGATE ? -1.0f : 1.0f;
    if (flags & MN_MAJOR) {
        for (int32_t q = first / 8; q < (first + rows) / 8; q++) {
            float tile[16][8];
            for (int32_t k = 0; k < 16; k++) {
                int64_t at = column_at(d, q, k);
                least = at < least ? at : least;
                most = at > most ? at : most;
                if (at < SMEM_BASE || at > limit) return 0;
                widen8(tile[k], smem + at, flags & BF16, sign);
            }
            for (int i = 0; i < 8; i++) {
                float *row = to + (int64_t)(8 * q - first + i) * pitch;
                for (int k = 0; k < 16; k++) row[k] = tile[k][i];
            }
        }
    } else {
        for (int32_t r = first; r < first + rows; r++) {
            for (int32_t c = 0; c < 2; c++) {
                int64_t at = row_at(d, r, c);
                least = at < least ? at : least;
                most = at > most ? at : most;
                if (at < SMEM_BASE || at > limit) return 0;
                widen8(to + (int64_t)(r - first) * pitch + 8 * c, smem + at, flags & BF16, sign);
            }
        }
    }
    *low = least < *low ? least : *low;
    *end = most + 16 > *end ? most + 16 : *end;
    return 1;
}

static int64_t newest(const Cta *cta, int64_t low, int64_t end) {
    int64_t stamp = 0;
    for (int64_t p = (low - SMEM_BASE) >> PAGE_SHIFT; p <= (end - 1 - SMEM_BASE) >> PAGE_SHIFT; p++)
        stamp = cta->stamps[p] > stamp ? cta->stamps[p] : stamp;
    return stamp;
}

/* `count` operands of 16 columns side by side as float32, kept until their bytes change; null if not modelled. */
static const float *converted(Cta *cta, const uint64_t *descriptors, int32_t count, int32_t first, int32_t rows,
                              int flags) {
    if (count > MAX_JOIN) return 0;
    OperandCache *cache = cta->operand_cache;
    if (!cache) cache = cta->operand_cache = calloc(1, sizeof(OperandCache));
    size_t bytes = sizeof(uint64_t) * (size_t)count;
    Converted *e = 0;
    for (int i = 0; i < CACHE && !e; i++) {
        Converted *c = &cache->entries[i];
        if (c->count == count && c->rows == rows && c->first == first && c->flags == flags &&
            !memcmp(c->descriptors, descriptors, bytes))
            e = c;
    }
    if (e && newest(cta, e->low, e->end) <= e->stamp) return e->values;
    if (!e) e = &cache->entries[cache->next++ % CACHE];
    int64_t pitch = 16 * count, need = pitch * rows;
    e->count = 0;
    if (e->capacity < need) {
        free(e->values);
        e->values = aligned_alloc(64, (size_t)(need * 4 + 63) / 64 * 64);
        e->capacity = need;
    }
    e->low = INT64_MAX;
    e->end = 0;
    for (int32_t i = 0; i < count; i++) {
        Descriptor d;
        if (!decode(descriptors[i], flags & SM100, &d) ||
            !convert(cta, &d, first, rows, flags, e->values + 16 * i, pitch, &e->low, &e->end))
            return 0;
    }
    memcpy(e->descriptors, descriptors, bytes);
    e->count = count;
    e->rows = rows;
    e->first = first;
    e->flags = flags;
    e->stamp = cta->cluster->machine->stamp;
    return e->values;
}

void fa_free_operands(Cta *cta) {
    OperandCache *cache = cta->operand_cache;
    if (!cache) return;
    for (int i = 0; i < CACHE; i++) free(cache->entries[i].values);
    free(cache);
    cta->operand_cache = 0;
}

typedef void (*Sgemm)(int, int, int, int64_t, int64_t, int64_t, float, const float *, int64_t, const float *,
                      int64_t, float, float *, int64_t);

static int64_t cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* product[m][n] = a[m][k] b[n][k]^T */
static void multiply(Machine *machine, const float *a, const float *b, float *product, int64_t m, int64_t n,
                     int64_t k) {
    int64_t start = cpu_ns();
    ((Sgemm)machine->gemm)(101, 111, 112, m, n, k, 1.0f, a, k, b, k, 0.0f, product, n);
    machine->matrix_ns += cpu_ns() - start;
}

static void count_mma(Warp *w, int32_t mode, int32_t m, int32_t n) {
    for (int i = 0; i < MAX_KINDS; i++) {
        MmaCount *c = &w->mma_kinds[i];
        if (i == w->kinds) {
            *c = (MmaCount){mode, m, n, 0, 0};
            w->kinds++;
        }
        if (c->kind == mode && c->m == m && c->n == n) {
            c->count++;
            return;
        }
    }
    w->fault = 1;
}

static int same_lanes(const void *values, int size) {
    return !memcmp(values, (const uint8_t *)values + size, (size_t)(31 * size));
}

/* -- wgmma; size: 1 bf16; mode: 1 A from registers, 2 A transposed, 4 B transposed, 8 A negated, 16 B negated;
 * count: n; destinations: the accumulators */

int32_t fa_wgmma(Warp *w, int32_t op, uint32_t mask) {
    if (!mask) return OK;
    const OperationInfo *o = info(w, op);
    int from_registers = o->mode & 1, b_at = from_registers ? 4 : 1;
    const uint64_t *b = source(w, o, b_at), *a = source(w, o, 0);
    if (mask != ~0u || !same_lanes(b, 8) || (!from_registers && !same_lanes(a, 8))) return host(w, op, mask);
    if (w->mma_count == MAX_MMA) return host(w, QUEUE_FULL, mask);
    int accumulate = (int)(*(const uint32_t *)source(w, o, b_at + 1) & 1);
    if (w->cluster->checks && !fc_wgmma(w, op, from_registers ? 0 : a[0], b[0], accumulate)) return host(w, op, mask);
    Mma *item = &w->mmas[w->mma_count++];
    w->open_mmas++;
    *item = (Mma){.operation = op, .b = b[0], .a = from_registers ? 0 : a[0], .warp = w->number};
    item->accumulate = accumulate;
    if (w->index % 4 == 0) {
        count_mma(w, 4 | from_registers, 64, o->count);
        w->bytes[MMA_SMEM] += o->count * 32 + (from_registers ? 0 : 64 * 32);
    }
    return OK;
}

static int same_accumulators(const Warp *w, const OperationInfo *x, const OperationInfo *y) {
    return x == y || (x->destinations == y->destinations &&
                      !memcmp(w->operands + x->first, w->operands + y->first, 4 * (size_t)x->destinations));
}

/* A of one operation from registers: word j of lane t has row t/4 + 8 (j%2), columns 2 (t%4) + 8 (j/2). */
static void a_from_registers(const Warp *w, const OperationInfo *o, float *to, int64_t pitch) {
    float sign = o->mode & 8 ? -1.0f : 1.0f;
    for (int j = 0; j < 4; j++) {
        const uint32_t *words = source(w, o, j);
        for (int t = 0; t < 32; t++) {
            float *at = to + (t / 4 + 8 * (j % 2)) * pitch + 2 * (t % 4) + 8 * (j / 2);
            at[0] = sign * widen((uint16_t)words[t], o->size);
            at[1] = sign * widen((uint16_t)(words[t] >> 16), o->size);
        }
    }
}

static int run_wgmma(Warp *w, const Mma *items, int32_t count) {
    const OperationInfo *first = info(w, items[0].operation);
    int32_t n = first->count, row = 16 * (w->index % 4);
    if (count > MAX_JOIN || !w->cluster->machine->gemm) return 0;
    uint64_t a_list[MAX_JOIN], b_list[MAX_JOIN];
    float a_buffer[16 * MAX_DEPTH], product[16 * MAX_ROWS];
    int64_t depth = 16 * count;
    for (int32_t i = 0; i < count; i++) {
        const OperationInfo *o = info(w, items[i].operation);
        if (o->mode != first->mode || o->size != first->size) return 0;
        a_list[i] = items[i].a;
        b_list[i] = items[i].b;
        if (o->mode & 1) a_from_registers(w, o, a_buffer + 16 * i, depth);
    }
    int b_flags = (first->size ? BF16 : 0) | (first->mode & 4 ? MN_MAJOR : 0) | (first->mode & 16 ? NEGATE : 0);
    int a_flags = (first->size ? BF16 : 0) | (first->mode & 2 ? MN_MAJOR : 0) | (first->mode & 8 ? NEGATE : 0);
    const float *b = converted(w->cta, b_list, count, 0, n, b_flags);
    const float *a = first->mode & 1 ? a_buffer : converted(w->cta, a_list, count, row, 16, a_flags);
    if (!a || !b) return 0;
    multiply(w->cluster->machine, a, b, product, 16, n, depth);
    for (int32_t block = 0; block < n / 8; block++) {
        for (int32_t half = 0; half < 2; half++) { /* rows 0-7 or 8-15 of 8 columns: two registers */
            float *even = destination(w, first, 4 * block + 2 * half), *odd = destination(w, first, 4 * block + 2 * half + 1);
            float tile[2][32];
            for (int r = 0; r < 8; r++) {
                const float *from = product + (8 * half + r) * n + 8 * block;
                for (int i = 0; i < 4; i++) {
                    tile[0][4 * r + i] = from[2 * i];
                    tile[1][4 * r + i] = from[2 * i + 1];
                }
            }
            if (items[0].accumulate) {
                for (int t = 0; t < 32; t++) even[t] = tile[0][t] + even[t];
                for (int t = 0; t < 32; t++) odd[t] = tile[1][t] + odd[t];
            } else {
                memcpy(even, tile[0], 128);
                memcpy(odd, tile[1], 128);
            }
        }
    }
    return 1;
}

/* Perform the oldest group. */
static int32_t perform_group(Warp *w) {
    int32_t count = w->groups[0];
    for (int32_t start = 0; start < count;) {
        int32_t end = start + 1;
        const OperationInfo *first = info(w, w->mmas[start].operation);
        while (end < count && w->mmas[end].accumulate && same_accumulators(w, first, info(w, w->mmas[end].operation)))
            end++;
        if (!run_wgmma(w, w->mmas + start, end - start)) {
            int32_t rc = host(w, PERFORM_WGMMA, (uint32_t)(start << 16 | end));
            if (rc != OK) return rc;
        }
        start = end;
    }
    w->mma_count -= count;
    w->group_count--;
    memmove(w->mmas, w->mmas + count, sizeof(Mma) * (size_t)w->mma_count);
    memmove(w->groups, w->groups + 1, sizeof(int32_t) * (size_t)w->group_count);
    w->cluster->machine->progress++;
    return OK;
}

int32_t fa_wgmma_commit(Warp *w, int32_t op, uint32_t mask) {
    (void)op;
    if (!mask) return OK;
    if (w->group_count == MAX_MMA) return host(w, QUEUE_FULL, mask);
    w->groups[w->group_count++] = w->open_mmas;
    if (w->cluster->checks) fc_close(w->cluster->checks, fc_agent(w), BY_WGMMA);
    w->open_mmas = 0;
    int32_t rc = OK;
    while (rc == OK && !w->cluster->machine->late && w->group_count) rc = perform_group(w);
    return rc;
}

int32_t fa_wgmma_wait(Warp *w, int32_t op, uint32_t mask) {
    int32_t rc = OK;
    while (rc == OK && mask && w->group_count > info(w, op)->count) rc = perform_group(w);
    if (mask && w->cluster->checks) fc_wgmma_wait(w, info(w, op)->count);
    return rc;
}

/* -- tcgen05; mode: 1 A from TMEM, 2 a pair of CTAs; offset: of D, offset2: of A; count: disable words */

int32_t fa_tensor_mma(Warp *w, int32_t op, uint32_t mask) {
    if (!mask) return OK;
    const OperationInfo *o = info(w, op);
    const Machine *machine = w->cluster->machine;
    Cta *cta = w->cta;
    if (machine->late || machine->observed || !machine->gemm) return host(w, op, mask);
    int from_tmem = o->mode & 1, pair = o->mode >> 1 & 1;
    const uint32_t *d = source(w, o, 0), *idesc = source(w, o, 3), accumulate = *(const uint32_t *)source(w, o, 4);
    const void *a = source(w, o, 1);
    const uint64_t *b = source(w, o, 2);
    for (uint32_t r = mask; r; r &= r - 1) {
        uint32_t i = low_lane(r);
        Shape s;
        if (!decode_instruction(idesc[i], &s)) return host(w, op, mask);
        int32_t step = s.m == 64 ? 8 : pair ? 32 : 16;
        if ((s.m != 128 && s.m != (pair ? 256 : 64)) || s.n % step || s.n <= 0 || s.n > 256 ||
            (pair && (cta->rank & 1 || w->cluster->size < 2)))
            return host(w, op, mask);
        if (cta->tensor_count == MAX_MMA) return host(w, QUEUE_FULL, mask);
        Mma *item = &cta->tensor[cta->tensor_count];
        *item = (Mma){.operation = op, .accumulate = (int32_t)(accumulate >> i & 1), .b = b[i], .idesc = idesc[i],
                      .warp = w->number};
        item->d = (uint64_t)((int64_t)d[i] + o->offset);
        item->a = from_tmem ? (uint64_t)((int64_t)((const uint32_t *)a)[i] + o->offset2) : ((const uint64_t *)a)[i];
        for (int k = 0; k < o->count; k++) item->off[k] = ((const uint32_t *)source(w, o, 5 + k))[i];
        if (w->cluster->checks && !fc_tensor_mma(w, op, item)) return host(w, op, r);
        cta->tensor_count++;
        count_mma(w, o->mode, s.m, s.n);
        w->bytes[MMA_SMEM] += 32 * (s.n + (from_tmem ? 0 : s.m));
    }
    return OK;
}

int fa_allocated(const Cta *cta, int64_t column, int64_t count) {
    if (column < 0 || column + count > 512) return 0;
    int16_t owner = cta->tmem_owner[column >> 5];
    for (int64_t c = column >> 5; c <= (column + count - 1) >> 5; c++)
        if (cta->tmem_owner[c] != owner) return 0;
    return owner && cta->tmem;
}

/* Add the rows of a product to the accumulator; 0 if not modelled here. */
static int accumulate_rows(Cta *cta, const Mma *item, const float *product, int32_t rows, int32_t n, int pair) {
    int64_t column = (int64_t)(item->d & 0xFFFF), lane = (int64_t)(item->d >> 16);
    int split = pair && rows == 64;
    if (!fa_allocated(cta, column, split ? n / 2 : n)) return 0;
    if (!split && (rows == 64 ? lane != 0 && lane != 16 : lane != 0)) return 0;
    float *to = (float *)cta->tmem + column * TMEM_LANES;
    for (int32_t first = 0; first < rows; first += 16) {
        for (int32_t j = 0; j < n; j++) {
            int64_t at;
            if (split) at = (int64_t)(j % (n / 2)) * TMEM_LANES + first + (j < n / 2 ? 0 : 64);
            else if (rows == 64) at = (int64_t)j * TMEM_LANES + 2 * first + lane;
            else at = (int64_t)j * TMEM_LANES + first;
            const float *from = product + (int64_t)first * n + j;
            float *out = to + at;
            if (item->accumulate) {
                for (int i = 0; i < 16; i++) out[i] = from[(int64_t)i * n] + out[i];
            } else {
                for (int i = 0; i < 16; i++) out[i] = from[(int64_t)i * n];
            }
        }
    }
    return 1;
}

static int a_from_tmem(const Cta *cta, const Mma *items, int32_t count, int32_t rows, int flags, float *to) {
    int64_t pitch = 16 * count;
    float sign = flags & NEGATE ? -1.0f : 1.0f;
    if (rows != 128) return 0;
    for (int32_t i = 0; i < count; i++) {
        int64_t column = (int64_t)(items[i].a & 0xFFFF);
        if (items[i].a >> 16 || !fa_allocated(cta, column, 8)) return 0;
        for (int c = 0; c < 8; c++) {
            const uint32_t *words = cta->tmem + (column + c) * TMEM_LANES;
            for (int r = 0; r < 128; r++) {
                float *at = to + r * pitch + 16 * i + 2 * c;
                at[0] = sign * widen((uint16_t)words[r], flags & BF16);
                at[1] = sign * widen((uint16_t)(words[r] >> 16), flags & BF16);
            }
        }
    }
    return 1;
}

static _Thread_local float a_buffer[MAX_ROWS * MAX_DEPTH], b_buffer[MAX_ROWS * MAX_DEPTH], products[256 * 256];

static int run_tensor(Cta *issuer, const Mma *items, int32_t count) {
    Cluster *c = issuer->cluster;
    const OperationInfo *o = c->machine->operations + items[0].operation;
    int pair = o->mode >> 1 & 1;
    Shape s;
    if (count > MAX_JOIN || !decode_instruction(items[0].idesc, &s)) return 0;
    for (int k = 0; k < 8; k++)
        if (items[0].off[k]) return 0;
    uint64_t a_list[MAX_JOIN], b_list[MAX_JOIN];
    for (int32_t i = 0; i < count; i++) {
        a_list[i] = items[i].a;
        b_list[i] = items[i].b;
    }
    int64_t depth = 16 * count;
    int32_t share = pair ? 2 : 1, rows = s.m / share;
    const float *b = 0;
    for (int32_t k = 0; k < share; k++) {
        const float *part = converted(c->ctas[issuer->rank ^ k], b_list, count, 0, s.n / share, s.b);
        if (!part) return 0;
        if (share == 1) b = part;
        else memcpy(b_buffer + k * (s.n / share) * depth, part, sizeof(float) * (size_t)(s.n / share * depth));
    }
    if (share == 2) b = b_buffer;
    for (int32_t k = 0; k < share; k++) {
        Cta *cta = c->ctas[issuer->rank ^ k];
        const float *a = a_buffer;
        if (o->mode & 1) {
            if (!a_from_tmem(cta, items, count, rows, s.a, a_buffer)) return 0;
        } else {
            a = converted(cta, a_list, count, 0, rows, s.a);
            if (!a) return 0;
        }
        multiply(c->machine, a, b, products, rows, s.n, depth);
        if (!accumulate_rows(cta, &items[0], products, rows, s.n, pair)) return 0;
    }
    return 1;
}

static int continues(const Machine *machine, const Mma *first, const Mma *next) {
    return next->accumulate && next->d == first->d && next->idesc == first->idesc &&
           machine->operations[next->operation].mode == machine->operations[first->operation].mode &&
           !memcmp(next->off, first->off, sizeof(next->off));
}

/* Perform what a CTA issued, in order. */
static int32_t perform_tensor(Warp *w) {
    Cta *cta = w->cta;
    const Machine *machine = w->cluster->machine;
    for (int32_t start = 0; start < cta->tensor_count;) {
        int32_t end = start + 1;
        while (end < cta->tensor_count && continues(machine, &cta->tensor[start], &cta->tensor[end])) end++;
        if (!run_tensor(cta, cta->tensor + start, end - start)) {
            int32_t rc = host(w, PERFORM_TENSOR, (uint32_t)(start << 16 | end));
            if (rc != OK) return rc;
        }
        w->cluster->machine->progress++;
        start = end;
    }
    cta->tensor_count = 0;
    return OK;
}

/* mode: 1 generic address, 2 multicast */
int32_t fa_tensor_commit(Warp *w, int32_t op, uint32_t mask) {
    if (!mask) return OK;
    const OperationInfo *o = info(w, op);
    Cluster *c = w->cluster;
    if (c->machine->late || c->machine->observed || !c->machine->gemm) return host(w, op, mask);
    int32_t rc = perform_tensor(w);
    if (rc != OK) return rc;
    for (uint32_t r = mask; r; r &= r - 1) {
        uint32_t i = low_lane(r);
        const void *base = source(w, o, 0);
        int64_t address = o->mode & 1 ? (int64_t)(((const uint64_t *)base)[i] - SHARED_WINDOW)
                                      : (int64_t)((const uint32_t *)base)[i];
        address += o->offset;
        uint32_t targets = o->mode & 2 ? ((const uint16_t *)source(w, o, 1))[i] : 1u << (address >> RANK_SHIFT & 31);
        if (!targets || targets >> c->size || address >> RANK_SHIFT >= c->size) return host(w, op, r);
        int64_t offset = address & ((1 << RANK_SHIFT) - 1);
        for (uint32_t t = targets; t; t &= t - 1) {
            MBarrier *bar = fa_find_mbarrier(c, (int64_t)low_lane(t) << RANK_SHIFT | offset);
            if (!bar || bar->pending < 1) return host(w, op, r);
        }
        Issue issue;
        int32_t epoch = 0;
        if (c->checks) {
            issue = fc_issue(w, op);
            epoch = fc_commit(w, op, targets);
        }
        for (uint32_t t = targets; t; t &= t - 1) {
            Cta *cta = c->ctas[low_lane(t)];
            MBarrier *bar = fa_find_mbarrier(c, (int64_t)low_lane(t) << RANK_SHIFT | offset);
            if (c->checks) fc_completed(&issue, c, cta, bar, fc_agent(w)->own[BY_MMA], epoch);
            bar->pending--;
            fa_mbarrier_check(cta, bar);
        }
        if (c->checks) fc_step(w);
        c->machine->progress++;
    }
    return OK;
}
