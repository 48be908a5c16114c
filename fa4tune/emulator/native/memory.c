/* Loads, stores and matrix moves. Semantics: runtime_memory.py, runtime_tcgen05.py. */

#include "checks.h"

/* Bytes of a lane in the registers of the operand. */
static inline int32_t register_bytes(const OperationInfo *o) { return o->extra[0]; }

/* Copy `count` elements of `size` bytes a lane from memory into destination registers. */
static void gather(Warp *w, const OperationInfo *o, uint32_t mask, uint8_t *const at[32]) {
    int32_t count = o->count, wide = register_bytes(o), sign = o->flag, size = o->size;
    for (int32_t j = 0; j < count; j++) {
        uint8_t *out = destination(w, o, j);
        if (mask == ~0u && size == 4 && wide == 4) {
            for (int i = 0; i < 32; i++) memcpy(out + 4 * i, at[i] + 4 * j, 4);
        } else if (mask == ~0u && size == 8 && wide == 8) {
            for (int i = 0; i < 32; i++) memcpy(out + 8 * i, at[i] + 8 * j, 8);
        } else {
            for (uint32_t r = mask; r; r &= r - 1) {
                uint32_t i = low_lane(r);
                int64_t value = 0;
                memcpy(&value, at[i] + size * j, (size_t)size);
                if (sign) value = (int64_t)((uint64_t)value << (64 - 8 * size)) >> (64 - 8 * size);
                memcpy(out + wide * (int32_t)i, &value, (size_t)wide);
            }
        }
    }
}

static void scatter(Warp *w, const OperationInfo *o, uint32_t mask, uint8_t *const at[32]) {
    int32_t count = o->count, wide = register_bytes(o), size = o->size;
    if (size == 4 && wide == 4 && count == 4) {
        const uint32_t *in[4];
        for (int j = 0; j < 4; j++) in[j] = source(w, o, 1 + j);
        for (uint32_t r = mask; r; r &= r - 1) {
            uint32_t i = low_lane(r), value[4] = {in[0][i], in[1][i], in[2][i], in[3][i]};
            memcpy(at[i], value, 16);
        }
        return;
    }
    for (int32_t j = 0; j < count; j++) {
        const uint8_t *in = source(w, o, 1 + j);
        for (uint32_t r = mask; r; r &= r - 1) {
            uint32_t i = low_lane(r);
            if (size == 4) memcpy(at[i] + 4 * j, in + wide * (int32_t)i, 4);
            else memcpy(at[i] + size * j, in + wide * (int32_t)i, (size_t)size);
        }
    }
}

/* Pointers of 32 lanes into shared memory; idle lanes repeat the first active one. 0 if a lane is out of bounds,
 * misaligned or not allowed. */
static int shared_pointers(Warp *w, const OperationInfo *o, const void *base, uint64_t window, uint32_t mask,
                           int32_t bytes, int cluster, uint8_t *at[32], Cta **target, int64_t range[2]) {
    uint32_t addresses[32], bad = 0, lowest = ~0u, highest = 0;
    const uint32_t *narrow = base;
    const uint64_t *wide = base;
    for (int i = 0; i < 32; i++)
        addresses[i] = (window ? (uint32_t)(wide[i] - window) : narrow[i]) + (uint32_t)o->offset;
    uint32_t first = addresses[low_lane(mask)], rank = first >> RANK_SHIFT;
    if (mask != ~0u) {
        for (int i = 0; i < 32; i++)
            if (!(mask >> i & 1)) addresses[i] = first;
    }
    for (int i = 0; i < 32; i++) {
        bad |= (addresses[i] ^ first) >> RANK_SHIFT | (addresses[i] & (uint32_t)(bytes - 1));
        uint32_t offset = addresses[i] & ((1u << RANK_SHIFT) - 1);
        lowest = offset < lowest ? offset : lowest;
        highest = offset > highest ? offset : highest;
    }
    if (bad || rank >= (uint32_t)w->cluster->size || (rank != (uint32_t)w->cta->rank && !cluster)) return 0;
    Cta *cta = w->cluster->ctas[rank];
    if (lowest < SMEM_BASE || (int64_t)highest - SMEM_BASE + bytes > cta->smem_bytes) return 0;
    uint8_t *origin = cta->smem - SMEM_BASE;
    for (int i = 0; i < 32; i++) at[i] = origin + (addresses[i] & ((1u << RANK_SHIFT) - 1));
    *target = cta;
    range[0] = lowest - SMEM_BASE;
    range[1] = highest - SMEM_BASE + bytes;
    return 1;
}

static const Region *region_of(const Machine *m, uint64_t address) {
    int32_t low = 0, high = m->region_count;
    while (low < high) {
        int32_t middle = (low + high) / 2;
        if (m->regions[middle].address <= address) low = middle + 1;
        else high = middle;
    }
    return low ? &m->regions[low - 1] : 0;
}

/* The region that begins at or before an address, -1 for none. */
int32_t fa_region_number(const Machine *m, uint64_t address) {
    const Region *r = region_of(m, address);
    return r ? (int32_t)(r - m->regions) : -1;
}

uint8_t *fa_global(const Machine *m, uint64_t address, int64_t bytes, int write) {
    const Region *r = region_of(m, address);
    if (!r || bytes < 0 || address - r->address + (uint64_t)bytes > (uint64_t)r->nbytes || (write && !r->writable))
        return 0;
    return r->bytes + (address - r->address);
}

/* Tell the checks about an access of lanes to global memory; extra[7]: a strong one. */
static void tell_global(Warp *w, int32_t op, const uint64_t *base, uint32_t lanes, int32_t bytes, int write) {
    const OperationInfo *o = info(w, op);
    uint64_t addresses[32];
    int32_t n = 0;
    for (; lanes; lanes &= lanes - 1) addresses[n++] = base[low_lane(lanes)] + (uint64_t)o->offset;
    int32_t region = fa_region_number(w->cluster->machine, addresses[0]);
    fg_access(w, op, region, addresses, n, bytes, write, o->extra[7], write ? A_GLOBAL_WRITE : A_GLOBAL_READ);
}

static int global_pointers(Warp *w, const OperationInfo *o, const uint64_t *base, uint32_t mask, int32_t bytes,
                           int write, uint8_t *at[32]) {
    uint64_t addresses[32], bad = 0, lowest = ~0ull, highest = 0, first = base[low_lane(mask)] + (uint64_t)o->offset;
    for (int i = 0; i < 32; i++) {
        addresses[i] = mask >> i & 1 ? base[i] + (uint64_t)o->offset : first;
        bad |= addresses[i] & (uint64_t)(bytes - 1);
        lowest = addresses[i] < lowest ? addresses[i] : lowest;
        highest = addresses[i] > highest ? addresses[i] : highest;
    }
    if (bad || highest >= SHARED_WINDOW) return 0;
    uint8_t *origin = fa_global(w->cluster->machine, lowest, (int64_t)(highest - lowest) + bytes, write);
    if (!origin) return 0;
    for (int i = 0; i < 32; i++) at[i] = origin + (addresses[i] - lowest);
    return 1;
}

/* Tell the checks about an access of lanes to shared memory. */
static void tell_shared(Warp *w, int32_t op, Cta *cta, uint8_t *const at[32], uint32_t lanes, int32_t bytes, int write) {
    int32_t offsets[32], n = 0;
    for (; lanes; lanes &= lanes - 1) offsets[n++] = (int32_t)(at[low_lane(lanes)] - cta->smem);
    fc_shared(w, op, cta, offsets, n, bytes, write);
}

static void count_shared(Warp *w, const Cta *cta, int64_t bytes, int write) {
    w->bytes[(cta == w->cta ? SMEM_READ : DSMEM_READ) + (write ? SMEM_WRITE - SMEM_READ : 0)] += bytes;
}

/* mode: 0 shared::cta, 1 shared::cluster, 2 global, 3 generic, 4 local; flag: sign-extend; extra[0] register bytes */
static int32_t access_lanes(Warp *w, int32_t op, uint32_t mask, int write) {
    if (!mask) return OK;
    const OperationInfo *o = info(w, op);
    int32_t bytes = o->size * o->count, mode = o->mode;
    const void *addresses = source(w, o, 0);
    int64_t lanes = __builtin_popcount(mask), range[2];
    uint8_t *at[32];
    uint64_t window = 0;
    if (mode == 3) {
        uint64_t first = ((const uint64_t *)addresses)[low_lane(mask)] + (uint64_t)o->offset;
        if (first < SHARED_WINDOW) {
            mode = 2;
        } else if (first < PARAM_WINDOW) {
            for (uint32_t r = mask; r; r &= r - 1) {
                uint64_t a = ((const uint64_t *)addresses)[low_lane(r)] + (uint64_t)o->offset;
                if (a < SHARED_WINDOW || a >= PARAM_WINDOW) return host(w, op, mask);
            }
            mode = 1;
            window = SHARED_WINDOW;
        } else if (first >= LOCAL_WINDOW) {
            mode = 4;
        } else {
            return host(w, op, mask);
        }
    }
    if (mode <= 1) {
        Cta *cta;
        if (!shared_pointers(w, o, addresses, window, mask, bytes, mode == 1, at, &cta, range))
            return host(w, op, mask);
        if (w->cluster->checks) tell_shared(w, op, cta, at, mask, bytes, write);
        count_shared(w, cta, lanes * bytes, write);
        if (write) touch(cta, range[0], range[1] - range[0]);
    } else if (mode == 2) {
        if (!global_pointers(w, o, addresses, mask, bytes, write, at)) return host(w, op, mask);
        if (w->cluster->checks) tell_global(w, op, addresses, mask, bytes, write);
        w->bytes[write ? GLOBAL_WRITE : GLOBAL_READ] += lanes * bytes;
    } else {
        if (!w->local) return host(w, op, mask);
        for (uint32_t i = 0; i < 32; i++) {
            uint64_t a = (((const uint64_t *)addresses)[i] + (uint64_t)o->offset) & (LOCAL_WINDOW - 1);
            if (!(mask >> i & 1)) a = 0;
            else if (a + (uint64_t)bytes > LOCAL_BYTES) return host(w, op, mask);
            at[i] = w->local + LOCAL_BYTES * i + a;
        }
    }
    if (write) {
        scatter(w, o, mask, at);
        if (mode != 4) w->cluster->machine->progress++;
    } else {
        gather(w, o, mask, at);
    }
    return OK;
}

int32_t fa_load(Warp *w, int32_t op, uint32_t mask) { return access_lanes(w, op, mask, 0); }

int32_t fa_store(Warp *w, int32_t op, uint32_t mask) { return access_lanes(w, op, mask, 1); }

/* count: matrices; flag: transposed */
static uint32_t matrix_lanes(const OperationInfo *o) { return o->count == 4 ? ~0u : (1u << 8 * o->count) - 1; }

static int matrix_rows(Warp *w, const OperationInfo *o, uint8_t *at[32], int64_t range[2], Cta **cta) {
    return shared_pointers(w, o, source(w, o, 0), 0, matrix_lanes(o), 16, 0, at, cta, range);
}

static void transpose8(uint16_t m[8][8]) {
    for (int i = 0; i < 8; i++)
        for (int j = i + 1; j < 8; j++) {
            uint16_t t = m[i][j];
            m[i][j] = m[j][i];
            m[j][i] = t;
        }
}

int32_t fa_ldmatrix(Warp *w, int32_t op, uint32_t mask) {
    if (!mask) return OK;
    const OperationInfo *o = info(w, op);
    uint8_t *at[32];
    int64_t range[2];
    Cta *cta;
    if (mask != ~0u || !matrix_rows(w, o, at, range, &cta)) return host(w, op, mask);
    if (w->cluster->checks) tell_shared(w, op, cta, at, matrix_lanes(o), 16, 0);
    for (int j = 0; j < o->count; j++) {
        uint16_t m[8][8];
        for (int i = 0; i < 8; i++) memcpy(m[i], at[8 * j + i], 16);
        if (o->flag) transpose8(m);
        memcpy(destination(w, o, j), m, 128);
    }
    w->bytes[SMEM_READ] += 128 * o->count;
    return OK;
}

int32_t fa_stmatrix(Warp *w, int32_t op, uint32_t mask) {
    if (!mask) return OK;
    const OperationInfo *o = info(w, op);
    uint8_t *at[32];
    int64_t range[2];
    Cta *cta;
    if (mask != ~0u || !matrix_rows(w, o, at, range, &cta)) return host(w, op, mask);
    if (w->cluster->checks) tell_shared(w, op, cta, at, matrix_lanes(o), 16, 1);
    for (int j = 0; j < o->count; j++) {
        uint16_t m[8][8];
        memcpy(m, source(w, o, 1 + j), 128);
        if (o->flag) transpose8(m);
        for (int i = 0; i < 8; i++) memcpy(at[8 * j + i], m[i], 16);
    }
    touch(cta, range[0], range[1] - range[0]);
    w->cluster->machine->progress++;
    w->bytes[SMEM_WRITE] += 128 * o->count;
    return OK;
}

/* -- tensor memory; mode: 0 32x32b, others through the host; count: columns */

static uint32_t *tmem_columns(Warp *w, int32_t op, uint32_t mask, int write) {
    const OperationInfo *o = info(w, op);
    const uint32_t *base = source(w, o, 0);
    if (mask != ~0u || o->mode || !w->cta->tmem) return 0;
    for (int i = 1; i < 32; i++)
        if (base[i] != base[0]) return 0;
    uint32_t address = base[0] + (uint32_t)o->offset, column = address & 0xFFFF, lane = address >> 16;
    if (lane != 32u * (uint32_t)(w->index % 4) || column + (uint32_t)o->count > 512) return 0;
    int16_t owner = w->cta->tmem_owner[column >> 5];
    if (!owner || w->cta->tmem_owner[(column + (uint32_t)o->count - 1) >> 5] != owner) return 0;
    if (w->cluster->checks) fc_tmem(w, op, (int32_t)column, o->count, (int32_t)lane, write);
    return w->cta->tmem + column * TMEM_LANES + lane;
}

int32_t fa_tmem_load(Warp *w, int32_t op, uint32_t mask) {
    if (!mask) return OK;
    const OperationInfo *o = info(w, op);
    const uint32_t *from = tmem_columns(w, op, mask, 0);
    if (!from) return host(w, op, mask);
    for (int j = 0; j < o->count; j++) memcpy(destination(w, o, j), from + TMEM_LANES * j, 128);
    w->bytes[TMEM_READ] += 128 * o->count;
    return OK;
}

int32_t fa_tmem_store(Warp *w, int32_t op, uint32_t mask) {
    if (!mask) return OK;
    const OperationInfo *o = info(w, op);
    uint32_t *to = w->cluster->machine->late ? 0 : tmem_columns(w, op, mask, 1);
    if (!to) return host(w, op, mask);
    for (int j = 0; j < o->count; j++) memcpy(to + TMEM_LANES * j, source(w, o, 1 + j), 128);
    w->cluster->machine->progress++;
    w->bytes[TMEM_WRITE] += 128 * o->count;
    return OK;
}

