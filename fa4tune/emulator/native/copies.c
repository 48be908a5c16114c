/* Tensor copies (TMA). Semantics: runtime_copy.py, tensor_map.py. In late mode all goes through the host. */

#include <stdlib.h>

#include "checks.h"

enum { MAX_RANK = 5 };

typedef struct {
    uint64_t address;
    int64_t sizes[MAX_RANK], strides[MAX_RANK], box[MAX_RANK], box_bytes;
    int32_t rank, element, swizzle;
} TensorMap;

static int decode(const uint8_t *raw, TensorMap *t) {
    static const uint8_t bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2};
    static const int32_t swizzles[] = {0, 32, 64, 128};
    uint32_t words[16];
    memcpy(words, raw, 64);
    t->address = words[0] | (uint64_t)words[1] << 32;
    t->rank = (int32_t)(words[2] >> 4 & 7) + 1;
    uint32_t code = words[2] >> 7 & 15;
    if (t->rank > MAX_RANK || code > 10 || t->address & 15 || !t->address || words[2] >> 11 & 3) return 0;
    t->swizzle = swizzles[words[2] >> 13 & 3];
    t->element = bytes[code];
    t->box_bytes = t->element;
    for (int i = 0; i < t->rank; i++) {
        t->strides[i] = i ? (int64_t)(words[2 + i] | (uint64_t)(words[7] >> 4 * (i - 1) & 15) << 32) << 4 : t->element;
        t->sizes[i] = (int64_t)words[8 + i] + 1;
        t->box[i] = (int64_t)(i ? words[14] >> 8 * (i - 1) & 255 : words[13] >> 24) + 1;
        t->box_bytes *= t->box[i];
    }
    int64_t inner = t->box[0] * t->element;
    return inner % 16 == 0 && (!t->swizzle || inner <= t->swizzle);
}

static int map_at(const Machine *m, uint64_t address, int32_t rank, TensorMap *t) {
    const uint8_t *raw;
    if (address >= PARAM_WINDOW) {
        uint64_t at = address - PARAM_WINDOW;
        if (at + 128 > (uint64_t)m->parameter_bytes) return 0;
        raw = m->parameters + at;
    } else {
        raw = fa_global(m, address, 128, 0);
        if (!raw) return 0;
    }
    return decode(raw, t) && t->rank == rank;
}

/* The part of a box inside of the tensor: memory of its first element, or null; *empty if there is no such part. */
static uint8_t *inside(const Machine *m, const TensorMap *t, const int64_t *at, int64_t *first, int64_t *count,
                       int write, int *empty) {
    int64_t offset = 0, extent = t->element;
    *empty = 0;
    for (int i = 0; i < t->rank; i++) {
        int64_t low = at[i] > 0 ? at[i] : 0, high = at[i] + t->box[i] < t->sizes[i] ? at[i] + t->box[i] : t->sizes[i];
        if (high <= low) {
            *empty = 1;
            return 0;
        }
        first[i] = low;
        count[i] = high - low;
        offset += low * t->strides[i];
        extent += (high - low - 1) * t->strides[i];
    }
    return fa_global(m, t->address + (uint64_t)offset, extent, write);
}

static inline int64_t swizzled(int64_t at, int32_t width) {
    static const uint8_t masks[] = {0, 1, 3, 3, 7};
    return at ^ ((at >> 7 & masks[width / 32]) << 4);
}

/* Copy between a row of the box in shared memory and `bytes` at its place in global memory (null: zeros). */
static void row_to_shared(uint8_t *smem, int64_t at, int64_t inner, int32_t swizzle, const uint8_t *from, int64_t skip,
                          int64_t bytes) {
    uint8_t row[2048];
    if (!from || skip || bytes != inner) {
        memset(row, 0, (size_t)inner);
        if (from) memcpy(row + skip, from, (size_t)bytes);
        from = row;
    }
    if (128 % inner == 0) { /* the row stays in one line of 128 bytes, whose number decides the swizzle */
        int64_t flip = swizzled(at, swizzle) ^ at;
        for (int64_t k = 0; k < inner; k += 16) memcpy(smem + ((at + k) ^ flip), from + k, 16);
        return;
    }
    for (int64_t k = 0; k < inner; k += 16) memcpy(smem + swizzled(at + k, swizzle), from + k, 16);
}

static void row_to_global(const uint8_t *smem, int64_t at, int64_t inner, int32_t swizzle, uint8_t *to, int64_t skip,
                          int64_t bytes) {
    uint8_t row[2048];
    for (int64_t k = 0; k < inner; k += 16) memcpy(row + k, smem + swizzled(at + k, swizzle), 16);
    memcpy(to, row + skip, (size_t)bytes);
}

/* Walk over the rows of a box. `origin` is the memory of its first element inside of the tensor. */
static void copy_box(const TensorMap *t, const int64_t *at, const int64_t *first, const int64_t *count, int empty,
                     uint8_t *origin, uint8_t *smem, int64_t offset, int write) {
    int64_t inner = t->box[0] * t->element, rows = t->box_bytes / inner, index[MAX_RANK] = {0};
    for (int64_t r = 0; r < rows; r++, offset += inner) {
        int64_t place = 0;
        int in = !empty;
        for (int i = 1; i < t->rank; i++) {
            int64_t relative = at[i] + index[i] - (empty ? 0 : first[i]);
            in = in && relative >= 0 && relative < count[i];
            place += relative * t->strides[i];
        }
        uint8_t *memory = in ? origin + place : 0;
        int64_t skip = in ? (first[0] - at[0]) * t->element : 0, bytes = in ? count[0] * t->element : 0;
        if (!write) row_to_shared(smem, offset, inner, t->swizzle, memory, skip, bytes);
        else if (memory) row_to_global(smem, offset, inner, t->swizzle, memory, skip, bytes);
        for (int i = 1; i < t->rank && ++index[i] == t->box[i]; i++) index[i] = 0;
    }
}

static int shared_box(const Cta *cta, int64_t offset, const TensorMap *t) {
    return !(offset & 127) && offset >= SMEM_BASE && offset - SMEM_BASE + t->box_bytes <= cta->smem_bytes;
}

static int64_t at_lane(const Warp *w, const OperationInfo *o, int32_t k, uint32_t lane) {
    return ((const int32_t *)source(w, o, k))[lane];
}

/* Tell the checks about the part of a box that lies in global memory, row by row. */
static void tell_box(Warp *w, int32_t op, const TensorMap *t, const int64_t *first, const int64_t *count, int write,
                     int32_t what) {
    int64_t rows = 1, index[MAX_RANK] = {0};
    uint64_t origin = t->address, few[512];
    for (int i = 0; i < t->rank; i++) origin += (uint64_t)(first[i] * t->strides[i]);
    for (int i = 1; i < t->rank; i++) rows *= count[i];
    uint64_t *starts = rows <= 512 ? few : malloc(sizeof(uint64_t) * (size_t)rows);
    for (int64_t r = 0; r < rows; r++) {
        starts[r] = origin;
        for (int i = 1; i < t->rank; i++) starts[r] += (uint64_t)(index[i] * t->strides[i]);
        for (int i = 1; i < t->rank && ++index[i] == count[i]; i++) index[i] = 0;
    }
    int32_t region = fa_region_number(w->cluster->machine, origin);
    fg_access(w, op, region, starts, (int32_t)rows, (int32_t)(count[0] * t->element), write, 0, what);
    if (starts != few) free(starts);
}

/* count: rank; offset: of the shared address, offset2: of the mbarrier; mode: 1 multicast, 2 a pair of CTAs */
static int32_t load_one(Warp *w, int32_t op, uint32_t lane) {
    const OperationInfo *o = info(w, op);
    Cluster *c = w->cluster;
    TensorMap t;
    int64_t at[MAX_RANK], first[MAX_RANK], count[MAX_RANK];
    if (!map_at(c->machine, ((const uint64_t *)source(w, o, 1))[lane], o->count, &t)) return 0;
    for (int i = 0; i < t.rank; i++) at[i] = at_lane(w, o, 2 + i, lane);
    int64_t shared = (int64_t)(uint32_t)at_lane(w, o, 0, lane) + o->offset;
    int64_t barrier = (int64_t)(uint32_t)at_lane(w, o, 2 + t.rank, lane) + o->offset2;
    int64_t owner = shared >> RANK_SHIFT, offset = shared & ((1 << RANK_SHIFT) - 1);
    int64_t bar_owner = barrier >> RANK_SHIFT, bar_offset = barrier & ((1 << RANK_SHIFT) - 1);
    int multicast = o->mode & 1, pair = o->mode & 2;
    if (owner >= c->size || (!multicast && !pair && bar_owner != owner)) return 0;
    uint32_t targets = multicast ? ((const uint16_t *)source(w, o, 3 + t.rank))[lane] : 1u << owner;
    if (!targets || targets >> c->size) return 0;
    MBarrier *bars[32];
    int64_t signal[32];
    for (uint32_t r = targets; r; r &= r - 1) {
        int64_t k = low_lane(r);
        signal[k] = multicast ? k : bar_owner;
        if (pair) signal[k] = (k & ~1ll) | (bar_owner & 1);
        bars[k] = fa_find_mbarrier(c, signal[k] << RANK_SHIFT | bar_offset);
        if (!bars[k] || !shared_box(c->ctas[k], offset, &t)) return 0;
    }
    int empty;
    uint8_t *origin = inside(c->machine, &t, at, first, count, 0, &empty);
    if (!origin && !empty) return 0;
    w->bytes[TMA_READ] += t.box_bytes;
    c->machine->progress++;
    Issue issue;
    if (c->checks) {
        if (!empty) tell_box(w, op, &t, first, count, 0, A_TENSOR_LOAD);
        issue = fc_issue(w, op);
    }
    for (uint32_t r = targets; r; r &= r - 1) {
        Cta *cta = c->ctas[low_lane(r)];
        copy_box(&t, at, first, count, empty, origin, cta->smem - SMEM_BASE, offset, 0);
        touch(cta, offset - SMEM_BASE, t.box_bytes);
        MBarrier *bar = bars[low_lane(r)];
        Cta *signalled = c->ctas[signal[low_lane(r)]];
        if (c->checks) fc_landed(&issue, c, cta, offset - SMEM_BASE, t.box_bytes, signalled, bar, A_TENSOR_LOAD);
        bar->tx -= (int32_t)t.box_bytes;
        fa_mbarrier_check(signalled, bar);
    }
    if (c->checks) fc_step(w);
    return 1;
}

int32_t fa_tma_load(Warp *w, int32_t op, uint32_t mask) {
    const Machine *m = w->cluster->machine;
    if (!mask) return OK;
    if (m->late || m->observed) return host(w, op, mask);
    for (uint32_t r = mask; r; r &= r - 1) {
        if (!load_one(w, op, low_lane(r))) return host(w, op, r);
    }
    return OK;
}

static int32_t store_one(Warp *w, int32_t op, uint32_t lane) {
    const OperationInfo *o = info(w, op);
    Cluster *c = w->cluster;
    TensorMap t;
    int64_t at[MAX_RANK], first[MAX_RANK], count[MAX_RANK];
    if (!map_at(c->machine, ((const uint64_t *)source(w, o, 1))[lane], o->count, &t)) return 0;
    for (int i = 0; i < t.rank; i++) at[i] = at_lane(w, o, 2 + i, lane);
    int64_t shared = (int64_t)(uint32_t)at_lane(w, o, 0, lane) + o->offset;
    int64_t offset = shared & ((1 << RANK_SHIFT) - 1);
    if (shared >> RANK_SHIFT != w->cta->rank || !shared_box(w->cta, offset, &t)) return 0;
    int empty;
    uint8_t *origin = inside(c->machine, &t, at, first, count, 1, &empty);
    if (!origin && !empty) return 0;
    if (c->checks) {
        int whole = 1;
        for (int i = 0; i < t.rank; i++) whole &= at[i] >= 0 && at[i] <= t.sizes[i] - t.box[i];
        fc_bulk_read(w, op, (int32_t)lane, offset - SMEM_BASE, t.box_bytes, A_TENSOR_STORE, whole);
        if (!empty) tell_box(w, op, &t, first, count, 1, A_TENSOR_STORE);
    }
    w->bytes[TMA_WRITE] += t.box_bytes;
    c->machine->progress++;
    if (!empty) copy_box(&t, at, first, count, empty, origin, w->cta->smem - SMEM_BASE, offset, 1);
    return 1;
}

/* A whole warp that stores the same box stores it once. */
static uint32_t distinct(const Warp *w, const OperationInfo *o, uint32_t mask) {
    uint32_t lane = low_lane(mask);
    for (uint32_t r = mask & (mask - 1); r; r &= r - 1) {
        uint32_t i = low_lane(r);
        if (((const uint64_t *)source(w, o, 1))[i] != ((const uint64_t *)source(w, o, 1))[lane]) return mask;
        for (int32_t k = 0; k < o->count + 2; k++)
            if (k != 1 && at_lane(w, o, k, i) != at_lane(w, o, k, lane)) return mask;
    }
    return 1u << lane;
}

int32_t fa_tma_store(Warp *w, int32_t op, uint32_t mask) {
    const OperationInfo *o = info(w, op);
    if (!mask) return OK;
    if (w->cluster->machine->late) return host(w, op, mask);
    for (uint32_t r = distinct(w, o, mask); r; r &= r - 1) {
        if (!store_one(w, op, low_lane(r))) return host(w, op, r);
    }
    return OK;
}
