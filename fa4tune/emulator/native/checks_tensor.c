/* What matrix operations, TMEM moves and registers tell the sanitizer. Semantics: checks_tensor.py. */

#include <stdlib.h>

#include "checks.h"
#include "operand.h"

/* -- operands in shared memory */

enum { KNOWN_OPERANDS = 256 };

/* Granules of some rows of an operand, relative to a start at `phase` in a KiB. */
typedef struct {
    int64_t phase, leading, stride;
    int32_t swizzle, first, rows, mn_major, count, contiguous;
    int64_t lowest, highest; /* granules */
    uint64_t pages[PAGE_WORDS];
    int32_t *list;
} Operand;

static _Thread_local Operand operands[KNOWN_OPERANDS];

static int ascending(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

static void fill(Operand *o, const Descriptor *d) {
    int32_t *list = malloc(sizeof(int32_t) * 2 * (size_t)o->rows), n = 0, kept = 0;
    if (o->mn_major) {
        for (int32_t q = o->first / 8; q < (o->first + o->rows) / 8; q++)
            for (int32_t k = 0; k < 16; k++) list[n++] = (int32_t)(column_at(d, q, k) >> 4);
    } else {
        for (int32_t r = o->first; r < o->first + o->rows; r++)
            for (int32_t c = 0; c < 2; c++) list[n++] = (int32_t)(row_at(d, r, c) >> 4);
    }
    qsort(list, (size_t)n, sizeof(int32_t), ascending);
    for (int32_t i = 0; i < n; i++)
        if (!kept || list[i] != list[kept - 1]) list[kept++] = list[i];
    o->list = list;
    o->count = kept;
    o->lowest = list[0];
    o->highest = list[kept - 1];
    o->contiguous = o->highest - o->lowest == kept - 1;
    memset(o->pages, 0, sizeof(o->pages));
    for (int32_t i = 0; i < kept && list[i] >> 6 < 64 * PAGE_WORDS; i++) o->pages[list[i] >> 12] |= 1ull << (list[i] >> 6 & 63);
}

static const Operand *operand(const Descriptor *d, int32_t first, int32_t rows, int mn_major) {
    Descriptor relative = *d;
    relative.start = d->start & 1023;
    uint64_t key = (uint64_t)relative.start * 31 + (uint64_t)d->leading * 1009 + (uint64_t)d->stride * 65537 +
                   (uint64_t)(d->swizzle * 7 + rows * 131 + first * 17 + mn_major);
    Operand *o = &operands[(key ^ key >> 9) % KNOWN_OPERANDS];
    if (o->list && o->phase == relative.start && o->leading == d->leading && o->stride == d->stride &&
        o->swizzle == d->swizzle && o->first == first && o->rows == rows && o->mn_major == mn_major)
        return o;
    free(o->list);
    *o = (Operand){.phase = relative.start, .leading = d->leading, .stride = d->stride, .swizzle = d->swizzle,
                   .first = first, .rows = rows, .mn_major = mn_major};
    fill(o, &relative);
    return o;
}

static void shift_pages(uint64_t *out, const uint64_t *in, int64_t by) {
    for (int64_t i = PAGE_WORDS - 1; i >= 0; i--) {
        int64_t from = i - (by >> 6), bits = by & 63;
        uint64_t word = from >= 0 && from < PAGE_WORDS ? in[from] << bits : 0;
        if (bits && from >= 1 && from <= PAGE_WORDS) word |= in[from - 1] >> (64 - bits);
        out[i] = word;
    }
}

/* Granules of rows of an operand in a CTA's memory; 0 where they leave it. */
static int operand_granules(const Cta *cta, const Descriptor *d, int32_t first, int32_t rows, int mn_major,
                            Granules *g) {
    const Operand *o = operand(d, first, rows, mn_major);
    int64_t base = d->start - o->phase, at = (base - SMEM_BASE) / 16;
    if (base + 16 * o->lowest < SMEM_BASE || base - SMEM_BASE + 16 * (o->highest + 1) > cta->smem_bytes) return 0;
    *g = (Granules){.start = at};
    if (o->contiguous) {
        g->start += o->lowest;
        g->length = o->count;
        g->runs = 1;
    } else {
        g->list = o->list;
        g->count = o->count;
    }
    shift_pages(g->pages, o->pages, at >> 6);
    return 1;
}

/* -- registers */

static const uint64_t *mask_at(const Checks *k, int32_t number) {
    return k->registers->masks + (int64_t)number * k->registers->words;
}

static int common(const uint64_t *a, const uint64_t *b, int32_t words) {
    uint64_t any = 0;
    for (int32_t i = 0; i < words; i++) any |= a[i] & b[i];
    return any != 0;
}

/* Before an operation that may touch a register too early. */
void fc_registers(Warp *w, int32_t number) {
    Checks *k = w->cluster->checks;
    Agent *a = fc_agent(w);
    const RegisterTable *t = k->registers;
    const RegisterCheck *c = &t->checks[number];
    if (c->touched >= 0)
        for (int32_t i = 0; i < t->words; i++) a->touched[i] |= mask_at(k, c->touched)[i];
    if (c->clears) memset(a->touched, 0, sizeof(uint64_t) * (size_t)t->words);
    if (c->flying >= 0 && common(a->flying_mask, mask_at(k, c->flying), t->words))
        fc_report_register(k, R_FLYING, w->number, c->operation, 0);
    if (c->moved >= 0) {
        int late = common(a->loading, mask_at(k, c->loading), t->words);
        const uint64_t *moved = mask_at(k, c->moved);
        for (int32_t i = 0; i < t->words; i++) a->loading[i] = late ? a->loading[i] | moved[i] : a->loading[i] & ~moved[i];
    } else if (c->loading >= 0 && common(a->loading, mask_at(k, c->loading), t->words)) {
        fc_report_register(k, R_LOADING, w->number, c->operation, 0);
        fc_assume_loaded(w);
    }
    for (int32_t i = 0; i < c->unset_count; i++) {
        const int32_t *pair = t->unset + 2 * (c->first_unset + i);
        if (!a->written[pair[0]]) fc_report_register(k, R_UNSET, w->number, c->operation, pair[1]);
    }
}

/* -- wgmma; extra[5], extra[6]: accumulators that may not have been written; extra[7]: mask of its registers */

void fc_wgmma_registers(Warp *w, int32_t operation, int accumulate) {
    Checks *k = w->cluster->checks;
    Agent *a = fc_agent(w);
    const RegisterTable *t = k->registers;
    const OperationInfo *o = info(w, operation);
    if (o->extra[7] >= 0 && common(a->touched, mask_at(k, o->extra[7]), t->words)) {
        fc_report_register(k, R_WGMMA_FENCE, w->number, operation, 0);
        for (int32_t i = 0; i < t->words; i++) a->touched[i] &= ~mask_at(k, o->extra[7])[i];
    }
    for (int32_t i = 0; accumulate && i < o->extra[6]; i++) {
        if (a->written[t->unset[2 * (o->extra[5] + i)]]) continue;
        fc_report_register(k, R_ACCUMULATOR, w->number, operation, 0);
        break;
    }
}

static void flies(Checks *k, Agent *a, int32_t mask) {
    if (mask < 0) return;
    int32_t words = k->registers->words;
    if (a->flying_count == a->flying_capacity) {
        a->flying_capacity = a->flying_capacity ? 2 * a->flying_capacity : 16;
        a->flying = realloc(a->flying, sizeof(Flying) * (size_t)a->flying_capacity);
    }
    a->flying[a->flying_count++] = (Flying){a->groups[BY_WGMMA] + 1, mask};
    for (int32_t i = 0; i < words; i++) a->flying_mask[i] |= mask_at(k, mask)[i];
}

/* A warp issues a wgmma: 0 if the plain functions must look at it, which find it faulty. */
int fc_wgmma(Warp *w, int32_t operation, uint64_t a_bits, uint64_t b_bits, int accumulate) {
    Checks *k = w->cluster->checks;
    Agent *a = fc_agent(w);
    const OperationInfo *o = info(w, operation);
    Shadow *s = &k->shared[w->cta->rank];
    int from_registers = o->mode & 1;
    Descriptor da, db;
    Granules ga, gb;
    int32_t rank = w->cta->rank;
    if (!decode(b_bits, 0, &db) || !operand_granules(w->cta, &db, 0, o->count, o->mode >> 2 & 1, &gb)) return 0;
    if (!from_registers && (!decode(a_bits, 0, &da) ||
                            !operand_granules(w->cta, &da, 16 * (w->index % 4), 16, o->mode >> 1 & 1, &ga)))
        return 0;
    fc_wgmma_registers(w, operation, accumulate);
    Issue i = {w->number, operation, a->clock[a->component], a->clock};
    int32_t component = fc_own(k, a, BY_WGMMA), epoch = a->groups[BY_WGMMA] + 1;
    if (!from_registers) fc_access(k, s, &ga, 0, &i, component, epoch, BY_WGMMA, A_WGMMA_A, 1, 1);
    int32_t number = fc_access(k, s, &gb, 0, &i, component, epoch, BY_WGMMA, A_WGMMA_B, 1, 1);
    fc_reach_number(k, number, rank);
    flies(k, a, o->extra[7]);
    return 1;
}

void fc_wgmma_wait(Warp *w, int32_t left) {
    Checks *k = w->cluster->checks;
    Agent *a = fc_agent(w);
    fc_own(k, a, BY_WGMMA);
    fc_awaited(k, a, BY_WGMMA, left);
    if (!a->flying_count) return;
    int32_t done = a->groups[BY_WGMMA] - left, kept = 0, words = k->registers->words;
    memset(a->flying_mask, 0, sizeof(uint64_t) * (size_t)words);
    for (int32_t n = 0; n < a->flying_count; n++) {
        if (a->flying[n].epoch <= done) continue;
        a->flying[kept++] = a->flying[n];
        for (int32_t i = 0; i < words; i++) a->flying_mask[i] |= mask_at(k, a->flying[n].mask)[i];
    }
    a->flying_count = kept;
}

/* -- tcgen05 */

static Granules columns(int64_t column, int32_t count, int64_t first_group, int32_t groups, int32_t step) {
    Granules g = {.start = first_group * TMEM_COLUMNS + column, .length = count, .runs = groups,
                  .stride = step * TMEM_COLUMNS};
    for (int32_t r = 0; r < groups; r++) {
        int64_t first = g.start + (int64_t)r * g.stride;
        for (int64_t p = first >> 4; p <= (first + count - 1) >> 4; p++) g.pages[p >> 6] |= 1ull << (p & 63);
    }
    return g;
}

/* tcgen05.ld and .st of 32 lanes; extra[7]: mask of the registers that a load writes */
void fc_tmem(Warp *w, int32_t operation, int32_t column, int32_t count, int32_t lane, int write) {
    Checks *k = w->cluster->checks;
    Agent *a = fc_agent(w);
    int32_t family = write ? BY_TMEM_STORE : BY_TMEM_LOAD, component = fc_own(k, a, family);
    int32_t mask = info(w, operation)->extra[7];
    Issue i = {w->number, operation, a->clock[a->component], a->clock};
    Granules g = columns(column, count, lane / 16, 2, 1);
    fc_access(k, &k->tensor[w->cta->rank], &g, write, &i, component, a->groups[family] + 1, family,
              write ? A_TMEM_STORE : A_TMEM_LOAD, 1, 1);
    if (!write && mask >= 0)
        for (int32_t n = 0; n < k->registers->words; n++) a->loading[n] |= mask_at(k, mask)[n];
}

/* A matrix operation of one or two CTAs is issued: 0 if the plain functions must look at it, which find it faulty. */
int fc_tensor_mma(Warp *w, int32_t operation, const Mma *item) {
    Checks *k = w->cluster->checks;
    Agent *agent = fc_agent(w);
    const OperationInfo *o = info(w, operation);
    int from_tmem = o->mode & 1, pair = o->mode >> 1 & 1;
    Shape s;
    Descriptor a, b;
    if (!decode_instruction(item->idesc, &s) || !decode(item->b, 1, &b)) return 0;
    if (!from_tmem && !decode(item->a, 1, &a)) return 0;
    int32_t share = pair ? 2 : 1, rows = s.m / share, split = pair && rows == 64;
    Granules ga[2], gb[2], gd[2];
    for (int32_t r = 0; r < share; r++) {
        Cta *cta = w->cluster->ctas[w->cta->rank ^ r];
        if (!operand_granules(cta, &b, 0, s.n / share, s.b & MN_MAJOR, &gb[r])) return 0;
        if (from_tmem) {
            int64_t column = (int64_t)(item->a & 0xFFFF), group = (int64_t)(item->a >> 16) / 16;
            if (item->a >> 32 || group >= TMEM_GROUPS || !fa_allocated(cta, column, 8)) return 0;
            int32_t groups = rows / 16 < TMEM_GROUPS - group ? rows / 16 : (int32_t)(TMEM_GROUPS - group);
            ga[r] = columns(column, 8, group, groups, 1);
        } else if (!operand_granules(cta, &a, 0, rows, s.a & MN_MAJOR, &ga[r])) {
            return 0;
        }
        int64_t column = (int64_t)(item->d & 0xFFFF), group = (int64_t)(item->d >> 16) / 16;
        int32_t count = split ? s.n / 2 : s.n;
        if (item->d >> 32 || group >= TMEM_GROUPS || !fa_allocated(cta, column, count)) return 0;
        if (rows == 64 && !split) gd[r] = columns(column, count, group, (int32_t)(TMEM_GROUPS - group + 1) / 2, 2);
        else gd[r] = columns(column, count, 0, TMEM_GROUPS, 1);
    }
    Issue i = {w->number, operation, agent->clock[agent->component], agent->clock};
    int32_t component = fc_own(k, agent, BY_MMA), epoch = agent->groups[BY_MMA] + 1;
    for (int32_t r = 0; r < share; r++) {
        int32_t rank = w->cta->rank ^ r;
        Shadow *smem = &k->shared[rank], *tmem = &k->tensor[rank];
        fc_access(k, smem, &gb[r], 0, &i, component, epoch, BY_MMA, A_MMA_B, 1, 1);
        fc_access(k, from_tmem ? tmem : smem, &ga[r], 0, &i, component, epoch, BY_MMA, from_tmem ? A_MMA_TMEM : A_MMA_A,
                  1, 1);
        if (item->accumulate) fc_access(k, tmem, &gd[r], 0, &i, component, epoch, BY_MMA, A_MMA_D, 1, 1);
        int32_t number = fc_access(k, tmem, &gd[r], 1, &i, component, epoch, BY_MMA, A_MMA_D, 1, 1);
        fc_reach_number(k, number, rank);
    }
    return 1;
}

/* Before the arrivals of a commit at the CTAs of a mask; the epoch that it stands for. */
int32_t fc_commit(Warp *w, int32_t operation, uint32_t ranks) {
    Checks *k = w->cluster->checks;
    Agent *a = fc_agent(w);
    int32_t epoch = fc_close(k, a, BY_MMA), issued = a->clock[a->component];
    Access access = {a->own[BY_MMA], epoch, issued, operation, w->number, BY_MMA, A_COMMIT};
    for (; ranks; ranks &= ranks - 1) fc_reach(k, &access, (int32_t)low_lane(ranks));
    return epoch;
}
