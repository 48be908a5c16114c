/* Control flow of a warp, barriers, and operations across the lanes of a warp. Semantics: barriers.py, warp.py. */

#include "checks.h"

/* -- scheduling */

void fa_push_ready(Cluster *c, int32_t number) { c->ready[c->ready_count++] = (int16_t)number; }

int32_t fa_pop_ready(Cluster *c) {
    int32_t number = c->ready[0];
    c->ready_count--;
    memmove(c->ready, c->ready + 1, sizeof(int16_t) * (size_t)c->ready_count);
    return number;
}

void fa_wake(Cluster *c, int32_t number) {
    Warp *w = c->warps[number];
    if (w->state == BLOCKED) {
        w->state = READY;
        fa_push_ready(c, number);
    }
}

static void wake_all(Cluster *c, int16_t *waiters, int32_t *waiting) {
    int32_t n = *waiting;
    int16_t woken[MAX_WARPS];
    memcpy(woken, waiters, sizeof(int16_t) * (size_t)n);
    *waiting = 0;
    for (int32_t i = 0; i < n; i++) fa_wake(c, woken[i]);
}

/* Run what is ready, first come first served, until nothing is. OK, FAULT, or SUSPEND after `limit` turns
 * without effect on memory or barriers. */
int32_t fa_run_ready(Cluster *c, int32_t fuel, int32_t limit) {
    Machine *m = c->machine;
    while (c->ready_count) {
        Warp *w = c->warps[fa_pop_ready(c)];
        int64_t before = m->progress;
        c->current = w->number;
        w->fuel = fuel;
        c->run(w);
        if (w->fault) return FAULT;
        if (w->state == READY) fa_push_ready(c, w->number);
        if (m->progress != before) c->stalled = 0;
        else if (++c->stalled > limit) return SUSPEND;
    }
    return OK;
}

static int32_t block(Warp *w, int32_t kind, int32_t index, int16_t *waiters, int32_t *waiting) {
    waiters[(*waiting)++] = (int16_t)w->number;
    w->state = BLOCKED;
    w->wait_kind = kind;
    w->wait_index = index;
    return SUSPEND;
}

/* -- control flow (warp.py: diverge, _pop, leave) */

static void pop(Warp *w) {
    while (w->depth) {
        Frame f = w->stack[--w->depth];
        f.mask &= w->alive;
        if (!f.mask || f.pc == EXIT) continue;
        w->pc = f.pc;
        w->join = f.join;
        w->mask = f.mask;
        return;
    }
    w->state = DONE;
}

/* After every change of the mask. */
static void settle(Warp *w) {
    while (w->state == READY && w->pc == w->join && w->depth) pop(w);
    w->lanes = __builtin_popcount(w->mask);
}

void fa_rejoin(Warp *w) {
    pop(w);
    settle(w);
}

static void push(Warp *w, int32_t pc, int32_t join, uint32_t mask) {
    if (w->depth < MAX_STACK) w->stack[w->depth++] = (Frame){pc, join, mask, 0};
    else w->fault = 1;
}

void fa_diverge(Warp *w, uint32_t taken, int32_t goal, int32_t following, int32_t join) {
    uint32_t mask = w->mask;
    push(w, join, w->join, mask);
    if (following != join) push(w, following, join, mask & ~taken);
    if (goal != join) {
        w->pc = goal;
        w->join = join;
        w->mask = taken & mask;
    } else {
        pop(w);
    }
    settle(w);
}

static void cluster_check(Cluster *c) {
    if (c->arrived >= c->expected) {
        c->arrived = 0;
        c->generation++;
        wake_all(c, c->waiters, &c->waiting);
    }
}

void fa_leave(Warp *w, uint32_t lanes, int32_t following) {
    uint32_t active = w->mask & w->alive, gone = lanes & active;
    Cluster *c = w->cluster;
    w->alive &= ~gone;
    c->expected -= __builtin_popcount(gone);
    if (c->arrived) cluster_check(c);
    c->machine->progress++;
    if (active & ~gone) {
        w->pc = following;
        w->mask = active & ~gone;
    } else {
        pop(w);
    }
    settle(w);
}

/* -- mbarriers */

MBarrier *fa_find_mbarrier(Cluster *c, int64_t address) {
    int64_t rank = address >> RANK_SHIFT, offset = address & ((1 << RANK_SHIFT) - 1);
    if (address & 7 || rank < 0 || rank >= c->size) return 0;
    Cta *cta = c->ctas[rank];
    if (offset < SMEM_BASE || offset - SMEM_BASE + 8 > cta->smem_bytes) return 0;
    int32_t number = cta->bar_index[(offset - SMEM_BASE) >> 3];
    return number && cta->bars[number - 1].live ? &cta->bars[number - 1] : 0;
}

static Cta *owner(Cluster *c, int64_t address) { return c->ctas[address >> RANK_SHIFT]; }

void fa_mbarrier_check(Cta *cta, MBarrier *bar) {
    if (bar->pending == 0 && bar->tx == 0) {
        bar->phase++;
        bar->pending = bar->count;
        cta->cluster->machine->progress++;
        wake_all(cta->cluster, bar->waiters, &bar->waiting);
    }
}

/* A new mbarrier's number, or -1 when there is no room. The granule may hold a dead one, which is used again. */
int32_t fa_new_mbarrier(Cta *cta, int32_t offset, int32_t count) {
    uint16_t *slot = &cta->bar_index[(offset - SMEM_BASE) >> 3];
    if (!*slot) {
        if (cta->bar_count == MAX_BARS) return -1;
        *slot = (uint16_t)++cta->bar_count;
    }
    MBarrier *bar = &cta->bars[*slot - 1];
    *bar = (MBarrier){.count = count, .pending = count, .live = 1, .offset = offset};
    return *slot - 1;
}

static int64_t window_address(const Warp *w, const OperationInfo *o, int32_t lane) {
    if (o->mode & 1) return (int64_t)(((const uint64_t *)source(w, o, 0))[lane] - SHARED_WINDOW) + o->offset;
    return (int64_t)((const uint32_t *)source(w, o, 0))[lane] + o->offset;
}

int32_t fa_mbarrier_init(Warp *w, int32_t op, uint32_t mask) {
    if (!mask) return OK;
    const OperationInfo *o = info(w, op);
    if (w->cluster->machine->observed) return host(w, op, mask);
    const uint32_t *count = source(w, o, 1);
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
        int64_t at = window_address(w, o, (int32_t)low_lane(rest));
        int64_t offset = at & ((1 << RANK_SHIFT) - 1);
        uint32_t n = count[low_lane(rest)];
        if (at & 7 || at >> RANK_SHIFT != w->cta->rank || offset < SMEM_BASE ||
            offset - SMEM_BASE + 8 > w->cta->smem_bytes || n < 1 || n >= 1 << 20)
            return host(w, op, rest);
        MBarrier *old = fa_find_mbarrier(w->cluster, at);
        if (old && (old->waiting || old->pending != old->count || old->tx)) return host(w, op, rest);
        int32_t number = fa_new_mbarrier(w->cta, (int32_t)offset, (int32_t)n);
        if (number < 0) return host(w, op, rest);
        if (w->cluster->checks) fc_init(w, op, w->cta, &w->cta->bars[number]);
    }
    w->cluster->machine->progress++;
    return OK;
}

/* Lanes of `rest` that name the same address as its first lane. */
static uint32_t same_address(const Warp *w, const OperationInfo *o, uint32_t rest) {
    if (!(rest & (rest - 1))) return rest;
    int64_t first = window_address(w, o, (int32_t)low_lane(rest));
    uint32_t same = 0;
    for (uint32_t r = rest; r; r &= r - 1) {
        if (window_address(w, o, (int32_t)low_lane(r)) == first) same |= r & -r;
    }
    return same;
}

static int64_t total(const uint32_t *values, uint32_t lanes) {
    int64_t sum = 0;
    for (; lanes; lanes &= lanes - 1) sum += values[low_lane(lanes)];
    return sum;
}

/* mode: 1 generic address, 2 expect_tx, 4 counted; flag: drop; extra[7]: relaxed */
int32_t fa_mbarrier_arrive(Warp *w, int32_t op, uint32_t mask) {
    if (!mask) return OK;
    const OperationInfo *o = info(w, op);
    if (w->cluster->machine->observed || o->flag) return host(w, op, mask);
    const uint32_t *extra = o->mode & 6 ? source(w, o, 1) : 0;
    for (uint32_t rest = mask; rest;) {
        uint32_t same = same_address(w, o, rest);
        MBarrier *bar = fa_find_mbarrier(w->cluster, window_address(w, o, (int32_t)low_lane(rest)));
        int64_t n = o->mode & 4 ? total(extra, same) : __builtin_popcount(same);
        int64_t tx = o->mode & 2 ? total(extra, same) : 0;
        if (!bar || n > bar->pending || tx > 1 << 20) return host(w, op, mask);
        rest &= ~same;
    }
    uint64_t *state = o->destinations ? destination(w, o, 0) : 0;
    for (uint32_t rest = mask; rest;) {
        uint32_t same = same_address(w, o, rest);
        int64_t address = window_address(w, o, (int32_t)low_lane(rest));
        MBarrier *bar = fa_find_mbarrier(w->cluster, address);
        int64_t phase = bar->phase;
        if (w->cluster->checks) fc_arrive(w, op, owner(w->cluster, address), bar, o->extra[7]);
        if (o->mode & 2) bar->tx += (int32_t)total(extra, same);
        bar->pending -= (int32_t)(o->mode & 4 ? total(extra, same) : __builtin_popcount(same));
        fa_mbarrier_check(owner(w->cluster, address), bar);
        for (uint32_t r = state ? same : 0; r; r &= r - 1) state[low_lane(r)] = (uint64_t)phase;
        rest &= ~same;
    }
    w->cluster->machine->progress++;
    return OK;
}

/* mode: 1 generic address, 2 parity, 4 blocking */
int32_t fa_mbarrier_wait(Warp *w, int32_t op, uint32_t mask) {
    if (!mask) return OK;
    const OperationInfo *o = info(w, op);
    if (w->cluster->machine->observed) return host(w, op, mask);
    const void *values = source(w, o, 1);
    uint32_t answer = 0;
    for (uint32_t rest = mask; rest;) {
        uint32_t same = same_address(w, o, rest);
        int32_t lane = (int32_t)low_lane(rest);
        int64_t address = window_address(w, o, lane);
        MBarrier *bar = fa_find_mbarrier(w->cluster, address);
        if (!bar) return host(w, op, mask);
        int done = o->mode & 2 ? (uint32_t)(bar->phase & 1) != (((const uint32_t *)values)[lane] & 1)
                               : (uint64_t)bar->phase != ((const uint64_t *)values)[lane];
        if (done) {
            answer |= same;
            if (w->cluster->checks) fc_wait(w, op, owner(w->cluster, address), bar);
        } else if (o->mode & 4 && !w->timed_out) {
            if (w->cluster->machine->late) return host(w, op, mask); /* may give up */
            Cta *cta = owner(w->cluster, address);
            if (bar->waiting == MAX_WAITERS) return host(w, op, mask);
            return block(w, WAIT_MBARRIER, (int32_t)(bar - cta->bars) | cta->rank << 16, bar->waiters, &bar->waiting);
        }
        rest &= ~same;
    }
    w->timed_out = 0;
    put_predicate(destination(w, o, 0), answer, mask);
    return OK;
}

/* -- named barriers and the cluster barrier */

static int uniform(const uint32_t *values, uint32_t mask) {
    uint32_t first = values[low_lane(mask)];
    for (; mask; mask &= mask - 1) {
        if (values[low_lane(mask)] != first) return 0;
    }
    return 1;
}

static int named_arrive(Warp *w, NamedBarrier *bar, int32_t expected) {
    int32_t number = (int32_t)(bar - w->cta->named);
    if (expected % 32 || expected == 0 || (bar->arrived && expected != bar->expected) || bar->arrived + 32 > expected)
        return 0;
    if (w->cluster->checks) fc_named_arrive(w, number, bar->generation);
    bar->used = 1;
    bar->expected = expected;
    bar->arrived += 32;
    if (bar->arrived == expected) {
        bar->arrived = 0;
        bar->generation++;
        wake_all(w->cluster, bar->waiters, &bar->waiting);
    }
    w->cluster->machine->progress++;
    return 1;
}

/* count: sources (1: number, 2: and thread count); mode: 1 wait too */
int32_t fa_barrier(Warp *w, int32_t op, uint32_t mask) {
    if (!mask) return OK;
    const OperationInfo *o = info(w, op);
    const uint32_t *numbers = source(w, o, 0), *counts = o->count == 2 ? source(w, o, 1) : 0;
    uint32_t number = numbers[low_lane(mask)];
    if (w->cluster->machine->observed || !uniform(numbers, mask) || number > 15 ||
        (counts && !uniform(counts, mask)))
        return host(w, op, mask);
    NamedBarrier *bar = &w->cta->named[number];
    int32_t expected = counts ? (int32_t)counts[low_lane(mask)] : (w->cta->thread_count + 31) / 32 * 32;
    if (!(o->mode & 1)) return named_arrive(w, bar, expected) ? OK : host(w, op, mask);
    if (w->token < 0) {
        int64_t generation = bar->generation;
        if (!named_arrive(w, bar, expected)) return host(w, op, mask);
        w->token = generation;
    }
    if (bar->generation == w->token) {
        if (bar->waiting == MAX_WAITERS) return host(w, op, mask);
        return block(w, WAIT_NAMED, (int32_t)number, bar->waiters, &bar->waiting);
    }
    if (w->cluster->checks) fc_named_wait(w, (int32_t)number, w->token);
    w->token = -1;
    return OK;
}

/* extra[7]: relaxed */
int32_t fa_cluster_arrive(Warp *w, int32_t op, uint32_t mask) {
    if (!mask) return OK;
    if (w->cluster->machine->observed) return host(w, op, mask);
    Cluster *c = w->cluster;
    w->cluster_round = c->generation;
    if (c->checks) fc_cluster_arrive(w, info(w, op)->extra[7]);
    c->arrived += mask == ~0u ? w->threads : __builtin_popcount(mask);
    cluster_check(c);
    c->machine->progress++;
    return OK;
}

int32_t fa_cluster_wait(Warp *w, int32_t op, uint32_t mask) {
    if (!mask) return OK;
    Cluster *c = w->cluster;
    if (c->machine->observed) return host(w, op, mask);
    if (c->generation == w->cluster_round) return block(w, WAIT_CLUSTER, 0, c->waiters, &c->waiting);
    if (c->checks) fc_cluster_wait(w, w->cluster_round);
    return OK;
}

/* -- lanes */

/* mode: 0 up, 1 down, 2 bfly, 3 idx */
int32_t fa_shfl(Warp *w, int32_t op, uint32_t mask) {
    if (!mask) return OK;
    const OperationInfo *o = info(w, op);
    const uint32_t *a = source(w, o, 0), *b = source(w, o, 1), *c = source(w, o, 2);
    uint32_t *d = destination(w, o, 0), inside = 0, from[32];
    memcpy(from, a, sizeof(from));
    for (int32_t lane = 0; lane < 32; lane++) {
        int32_t by = (int32_t)(b[lane] & 31), clamp = (int32_t)(c[lane] & 31);
        int32_t segment = (int32_t)(c[lane] >> 8 & 31);
        int32_t high = (lane & segment) | (clamp & ~segment), low = lane & segment, j, ok;
        switch (o->mode) {
            case 0: j = lane - by; ok = j >= high; break;
            case 1: j = lane + by; ok = j <= high; break;
            case 2: j = lane ^ by; ok = j <= high; break;
            default: j = low | (by & ~segment); ok = j <= high; break;
        }
        inside |= (uint32_t)ok << lane;
        if (mask >> lane & 1) d[lane] = from[ok ? j : lane];
    }
    if (o->destinations == 2) put_predicate(destination(w, o, 1), inside, mask);
    return OK;
}

/* mode: 1 generic addresses; sources address, rank */
int32_t fa_mapa(Warp *w, int32_t op, uint32_t mask) {
    const OperationInfo *o = info(w, op);
    const void *from = source(w, o, 0);
    const uint32_t *rank = source(w, o, 1);
    void *to = destination(w, o, 0);
    for (uint32_t r = mask; r; r &= r - 1) {
        if (rank[low_lane(r)] >= (uint32_t)w->cluster->size) return host(w, op, mask);
    }
    for (uint32_t r = mask; r; r &= r - 1) {
        uint32_t i = low_lane(r);
        if (o->mode & 1) {
            uint64_t at = ((const uint64_t *)from)[i] & ((1ull << RANK_SHIFT) - 1);
            ((uint64_t *)to)[i] = SHARED_WINDOW + ((uint64_t)rank[i] << RANK_SHIFT | at);
        } else {
            uint32_t at = ((const uint32_t *)from)[i] & ((1u << RANK_SHIFT) - 1);
            ((uint32_t *)to)[i] = rank[i] << RANK_SHIFT | at;
        }
    }
    return OK;
}

int32_t fa_first_lane(uint32_t mask) { return mask ? (int32_t)low_lane(mask) : 0; }

/* Sizes of the structs, in the order of layout.py. */
void fa_sizes(int64_t *out) {
    int64_t sizes[] = {sizeof(OperationInfo), sizeof(MBarrier), sizeof(NamedBarrier), sizeof(Region),
                       sizeof(Machine), sizeof(Mma), sizeof(MmaCount), sizeof(Warp), sizeof(Cta), sizeof(Cluster),
                       sizeof(Access), sizeof(Report), sizeof(RegisterCheck), sizeof(RegisterTable)};
    memcpy(out, sizes, sizeof(sizes));
}

/* -- what only the host does */

int32_t fa_host(Warp *w, int32_t op, uint32_t mask) {
    if (!mask || w->fault) return OK;
    return host(w, op, mask);
}

/* Without late mode there is nothing to do. */
int32_t fa_late_only(Warp *w, int32_t op, uint32_t mask) {
    if (!mask || !w->cluster->machine->late) return OK;
    return host(w, op, mask);
}

/* What changes nothing but the checks, and without late mode nothing else. mode: 0 tcgen05.wait::ld, 1 ::st, 2 a fence
 * of a kind in flag, 3 tcgen05.fence (flag: before), 4 commit and 5 wait (count) of bulk groups */
int32_t fa_checked(Warp *w, int32_t op, uint32_t mask) {
    const OperationInfo *o = info(w, op);
    int32_t late = w->cluster->machine->late;
    if (!mask) return OK;
    if (late && (o->mode == 1 || o->mode >= 4)) return host(w, op, mask);
    if (o->mode <= 1) fc_tcgen05_wait(w, o->mode ? BY_TMEM_STORE : BY_TMEM_LOAD);
    else if (o->mode == 2) fc_fence(w, o->flag);
    else if (o->mode == 3) fc_tcgen05_fence(w, o->flag);
    else if (o->mode == 4) fc_bulk_commit(w, mask);
    else fc_bulk_wait(w, mask, o->count);
    return OK;
}
