/* Vector clocks of the sanitizer, and its findings. Semantics: checks_cluster.py. */

#include <stdlib.h>

#include "checks.h"

/* -- memory that lives as long as the checks */

void *fc_keep(Checks *k, size_t bytes) {
    if (k->block_count == k->block_capacity) {
        k->block_capacity = k->block_capacity ? 2 * k->block_capacity : 256;
        k->blocks = realloc(k->blocks, sizeof(void *) * (size_t)k->block_capacity);
    }
    return k->blocks[k->block_count++] = calloc(1, bytes);
}

void *fc_grown(void *old, int32_t count, int32_t *capacity, size_t bytes) {
    if (count < *capacity) return old;
    *capacity = *capacity ? 2 * *capacity : 8;
    return realloc(old, bytes * (size_t)*capacity);
}

static int32_t *new_clock(Checks *k, int rows) { return fc_keep(k, sizeof(int32_t) * (size_t)(rows * k->size)); }

static void new_shadow(Checks *k, Shadow *s, int32_t granules, int tensor) {
    s->granules = granules;
    s->tensor = tensor;
    s->page_shift = tensor ? 4 : 6;
    s->valid = fc_keep(k, sizeof(int32_t) * (size_t)granules);
    s->writes.row_of = fc_keep(k, sizeof(int16_t) * (size_t)k->size);
    s->reads.row_of = fc_keep(k, sizeof(int16_t) * (size_t)k->size);
    if (!tensor) s->fine_of = fc_keep(k, sizeof(int16_t) * (size_t)granules);
}

enum { SEEN = 1 << 12 };

Checks *fc_new(Cluster *c, ReportFunction call, const RegisterTable *registers, Globals *globals) {
    Checks *k = calloc(1, sizeof(Checks));
    k->cluster = c;
    k->call = call;
    k->registers = registers;
    k->globals = globals;
    fg_begin(globals);
    k->warps_per_cta = c->warp_count / c->size;
    k->size = 1 + 7 * c->warp_count + 256 * c->size;
    int32_t limit = k->size;
    k->size = (k->size + 15) / 16 * 16;
    k->components = 1;
    k->accesses = malloc(sizeof(Access) * 1024);
    k->accesses_capacity = 1024;
    k->accesses_count = 1;
    memset(k->accesses, 0, sizeof(Access));
    k->agents = fc_keep(k, sizeof(Agent) * (size_t)c->warp_count);
    k->shared = fc_keep(k, sizeof(Shadow) * (size_t)c->size);
    k->tensor = fc_keep(k, sizeof(Shadow) * (size_t)c->size);
    k->barriers = fc_keep(k, sizeof(BarrierClocks) * (size_t)(c->size * MAX_BARS));
    k->named = fc_keep(k, sizeof(BarrierClocks) * (size_t)(c->size * 16));
    k->outstanding = fc_keep(k, sizeof(Access) * (size_t)(k->size * c->size));
    k->order = fc_keep(k, sizeof(int32_t) * (size_t)(k->size * c->size));
    k->seen = fc_keep(k, sizeof(uint64_t) * SEEN);
    for (int32_t r = 0; r < c->size; r++) {
        new_shadow(k, &k->shared[r], (c->ctas[r]->smem_bytes + 15) / 16, 0);
        new_shadow(k, &k->tensor[r], TMEM_GRANULES, 1);
    }
    size_t words = (size_t)(registers->words ? registers->words : 1);
    for (int32_t i = 0; i < c->warp_count; i++) {
        Agent *a = &k->agents[i];
        a->warp = i;
        a->clock = new_clock(k, CLOCKS);
        a->component = k->components++;
        a->at = -1;
        a->loading = fc_keep(k, sizeof(uint64_t) * words);
        a->touched = fc_keep(k, sizeof(uint64_t) * words);
        a->flying_mask = fc_keep(k, sizeof(uint64_t) * words);
        a->written = fc_keep(k, (size_t)registers->tracked + 1);
        if (registers->start >= 0)
            memcpy(a->touched, registers->masks + registers->start * registers->words, sizeof(uint64_t) * words);
        c->warps[i]->written = a->written;
        a->clock[KNOWN * k->size + a->component]++;
        a->clock[LENIENT * k->size + a->component]++;
    }
    k->limit = limit;
    c->checks = k;
    return k;
}

void fc_free(Checks *k) {
    Shadow *all[2] = {k->shared, k->tensor};
    for (int i = 0; i < 2; i++)
        for (int32_t r = 0; r < k->cluster->size; r++) {
            Shadow *s = &all[i][r];
            free(s->writes.rows);
            free(s->reads.rows);
            for (int32_t f = 0; f < s->fine_count; f++) free(s->fine[f].parts);
            free(s->fine);
        }
    for (int32_t i = 0; i < k->cluster->warp_count; i++) {
        free(k->agents[i].initialised);
        free(k->agents[i].initialised_generation);
        free(k->agents[i].flying);
    }
    for (int32_t i = 0; i < k->block_count; i++) free(k->blocks[i]);
    free(k->blocks);
    free(k->accesses);
    k->cluster->checks = 0;
    free(k);
}

/* -- findings */

Report *fc_blank(Checks *k, int32_t kind, int32_t warp, int32_t operation) {
    k->report = (Report){.kind = kind, .warp = warp, .operation = operation};
    return &k->report;
}

void fc_report_register(Checks *k, int32_t kind, int32_t warp, int32_t operation, int32_t index) {
    fc_blank(k, kind, warp, operation)->index = index;
    fc_tell(k);
}

void fc_global_race(Checks *k, int32_t warp, const GlobalAccess *other, const GlobalAccess *by) {
    Report *r = fc_blank(k, R_GLOBAL_RACE, warp, by->operation);
    r->what = by->what;
    r->flags = other->cluster != by->cluster;
    r->against = (Access){.operation = other->operation, .warp = other->warp, .what = other->what, .issued = other->cluster};
    fc_tell(k);
}

/* Whether a report is new; Python keeps one of each, this only spares its time. */
static int is_new(Checks *k, const Report *r) {
    uint64_t key = (uint64_t)(r->kind + 1) * 0x9E3779B97F4A7C15ull;
    const int32_t parts[] = {r->operation, r->what, r->against.operation, r->flags,
                             r->against.family, r->tensor, r->cta, r->index};
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
        key = (key ^ (uint64_t)(uint32_t)parts[i]) * 0xBF58476D1CE4E5B9ull ^ key >> 31;
    key |= 1;
    for (uint32_t at = (uint32_t)(key >> 40) % SEEN, n = 0; n < SEEN; n++, at = (at + 1) % SEEN) {
        if (k->seen[at] == key) return 0;
        if (!k->seen[at]) {
            if (k->seen_count < SEEN / 2) {
                k->seen[at] = key;
                k->seen_count++;
            }
            return 1;
        }
    }
    return 1;
}

void fc_tell(Checks *k) {
    if (is_new(k, &k->report)) k->call();
}

static void tell_barrier(Checks *k, int32_t kind, int32_t warp, int32_t operation, const Cta *owner,
                         const MBarrier *bar) {
    Report *r = fc_blank(k, kind, warp, operation);
    r->cta = owner->rank;
    r->barrier = bar->offset;
    k->call(); /* its state is part of the message */
}

/* -- components and clocks */

static inline int32_t used(const Checks *k) { return (k->components + 15) & ~15; }

static int32_t new_component(Checks *k) {
    if (k->components == k->limit) {
        fc_blank(k, R_TOO_MANY, 0, -1)->index = k->limit;
        k->call();
        return k->limit - 1;
    }
    return k->components++;
}

static void step(Checks *k, Agent *a) {
    a->clock[KNOWN * k->size + a->component]++;
    a->clock[LENIENT * k->size + a->component]++;
}

void fc_step(Warp *w) { step(w->cluster->checks, fc_agent(w)); }

static void merge(int32_t *restrict to, const int32_t *restrict from, int32_t n) {
    for (int32_t i = 0; i < n; i++) to[i] = from[i] > to[i] ? from[i] : to[i];
}

static void merge_shared(const Checks *k, int32_t *to, const int32_t *from) {
    for (int r = 0; r < SHARED_CLOCKS; r++) merge(to + r * k->size, from + r * k->size, used(k));
}

int32_t fc_own(Checks *k, Agent *a, int32_t family) {
    if (!a->own[family]) a->own[family] = new_component(k);
    return a->own[family];
}

int32_t fc_close(Checks *k, Agent *a, int32_t family) {
    fc_own(k, a, family);
    return ++a->groups[family];
}

void fc_awaited(Checks *k, Agent *a, int32_t family, int32_t left) {
    int32_t component = a->own[family], epoch = a->groups[family] - left;
    if (!component) return;
    int32_t *known = fc_row(k, a->clock, KNOWN), *lenient = fc_row(k, a->clock, LENIENT);
    if (known[component] < epoch) known[component] = epoch;
    if (lenient[component] < epoch) lenient[component] = epoch;
}

/* -- fences */

/* mode: 1 initialisations of mbarriers, 2 between proxies, 4 of shared memory */
void fc_fence(Warp *w, int32_t mode) {
    Checks *k = w->cluster->checks;
    Agent *a = fc_agent(w);
    if (mode & 1) {
        for (int32_t i = 0; i < a->initialised_count; i++)
            if (a->initialised[i]->generation == a->initialised_generation[i]) a->initialised[i]->fenced = 1;
        a->initialised_count = 0;
    }
    if (mode & 2) {
        if (mode & 4) {
            merge(fc_row(k, a->clock, PROXIED), fc_row(k, a->clock, KNOWN), used(k));
            step(k, a);
        }
        return;
    }
    if (!a->fenced) a->fenced = new_clock(k, SHARED_CLOCKS);
    memcpy(a->fenced, a->clock, sizeof(int32_t) * (size_t)(SHARED_CLOCKS * k->size));
    a->has_fenced = 1;
    step(k, a);
}

void fc_tcgen05_fence(Warp *w, int32_t before) {
    Checks *k = w->cluster->checks;
    Agent *a = fc_agent(w);
    if (!before) {
        merge(fc_row(k, a->clock, TENSOR), fc_row(k, a->clock, KNOWN), used(k));
        return;
    }
    for (int32_t f = BY_TMEM_LOAD; f <= BY_TMEM_STORE; f++) {
        int32_t component = a->own[f];
        if (component) fc_row(k, a->clock, KNOWN)[component] = fc_row(k, a->clock, LENIENT)[component];
    }
    /* a relaxed arrival that follows orders tensor work, and nothing else (PTX ISA, tcgen05 memory consistency) */
    if (!a->fenced) a->fenced = new_clock(k, SHARED_CLOCKS);
    for (int32_t i = 0; i < k->cluster->warp_count; i++)
        for (int32_t f = BY_MMA; f <= BY_TMEM_STORE; f++) {
            int32_t component = k->agents[i].own[f];
            for (int r = 0; component && r < SHARED_CLOCKS; r++) {
                int32_t at = r * k->size + component;
                merge(a->fenced + at, a->clock + at, 1);
            }
        }
    a->has_fenced = 1;
}

void fc_tcgen05_wait(Warp *w, int32_t family) {
    Checks *k = w->cluster->checks;
    Agent *a = fc_agent(w);
    int32_t epoch = fc_close(k, a, family), component = a->own[family];
    fc_row(k, a->clock, LENIENT)[component] = epoch;
    fc_row(k, a->clock, TENSOR)[component] = epoch;
    if (family == BY_TMEM_LOAD) memset(a->loading, 0, sizeof(uint64_t) * (size_t)k->registers->words);
}

void fc_assume_loaded(Warp *w) {
    Agent *a = fc_agent(w);
    fc_tcgen05_wait(w, BY_TMEM_LOAD);
    fc_row(w->cluster->checks, a->clock, KNOWN)[a->own[BY_TMEM_LOAD]] = a->groups[BY_TMEM_LOAD];
}

/* -- barriers */

static void release(Checks *k, Agent *a, BarrierClocks *b, int relaxed) {
    if (relaxed && !a->has_fenced) return;
    merge_shared(k, b->coming, relaxed ? a->fenced : a->clock);
    step(k, a);
}

static BarrierClocks *clocks_of(Checks *k, const Cta *cta, const MBarrier *bar) {
    return &k->barriers[cta->rank * MAX_BARS + (int32_t)(bar - cta->bars)];
}

/* The clocks of an mbarrier, its phase brought up to date before anybody else arrives. */
static BarrierClocks *sync_phase(Checks *k, const Cta *cta, const MBarrier *bar) {
    BarrierClocks *b = clocks_of(k, cta, bar);
    if (!b->coming) { /* never initialised: no warp's arrival gets here */
        b->coming = new_clock(k, SHARED_CLOCKS);
        b->done = new_clock(k, SHARED_CLOCKS);
        b->uses = new_clock(k, 1);
    }
    if (b->phase != bar->phase) {
        b->phase = bar->phase;
        memcpy(b->done, b->coming, sizeof(int32_t) * (size_t)(SHARED_CLOCKS * k->size));
    }
    return b;
}

static void require_initialised(Checks *k, const BarrierClocks *b, const int32_t *clock, int32_t component,
                                int32_t warp, int32_t operation, const Cta *owner, const MBarrier *bar) {
    if (fc_const_row(k, clock, KNOWN)[b->init_component] < b->init_epoch && b->init_component != component)
        tell_barrier(k, R_INIT_RACE, warp, operation, owner, bar);
}

void fc_use(Warp *w, int32_t operation, Cta *cta, MBarrier *bar) {
    Checks *k = w->cluster->checks;
    Agent *a = fc_agent(w);
    BarrierClocks *b = sync_phase(k, cta, bar);
    require_initialised(k, b, a->clock, a->component, w->number, operation, cta, bar);
    b->uses[a->component] = fc_epoch_of(a);
    if (cta == w->cta) return;
    if (!b->fenced) tell_barrier(k, R_BARRIER_FENCE, w->number, operation, cta, bar);
    fc_touch_other(k, a, operation, cta->rank, A_MBARRIER_OF | cta->rank << 16);
}

void fc_arrive(Warp *w, int32_t operation, Cta *cta, MBarrier *bar, int relaxed) {
    Checks *k = w->cluster->checks;
    fc_use(w, operation, cta, bar);
    release(k, fc_agent(w), clocks_of(k, cta, bar), relaxed);
}

void fc_wait(Warp *w, int32_t operation, Cta *cta, MBarrier *bar) {
    Checks *k = w->cluster->checks;
    fc_use(w, operation, cta, bar);
    merge_shared(k, fc_agent(w)->clock, clocks_of(k, cta, bar)->done);
}

static void require_unused(Warp *w, int32_t operation, Cta *cta, MBarrier *bar) {
    Checks *k = w->cluster->checks;
    const BarrierClocks *b = clocks_of(k, cta, bar);
    const int32_t *known = fc_row(k, fc_agent(w)->clock, KNOWN);
    for (int32_t i = 0; i < k->components; i++) {
        if (b->uses[i] > known[i]) {
            tell_barrier(k, R_REUSE, w->number, operation, cta, bar);
            return;
        }
    }
}

static void write_barrier(Warp *w, int32_t operation, Cta *cta, MBarrier *bar, int live) {
    Checks *k = w->cluster->checks;
    Shadow *s = &k->shared[cta->rank];
    int32_t offset = bar->offset - SMEM_BASE, granule = offset >> 4, mask = 0xFF << (offset & 8);
    if (live) {
        const Agent *a = fc_agent(w);
        int32_t number =
            fc_add(k, (Access){0, GUARD_EPOCH, fc_epoch_of(a), operation, w->number, BY_BARRIER, A_BARRIER});
        fc_add_part(fc_parts_at(s, granule), (Part){0, 1, mask, number});
        return;
    }
    if (s->fine_of[granule]) fc_drop_parts(&s->fine[s->fine_of[granule] - 1], 0, 1, mask);
    fc_shared(w, operation, cta, &offset, 1, 8, 1);
}

void fc_init(Warp *w, int32_t operation, Cta *cta, MBarrier *bar) {
    Checks *k = w->cluster->checks;
    Agent *a = fc_agent(w);
    BarrierClocks *b = clocks_of(k, cta, bar);
    write_barrier(w, operation, cta, bar, 0);
    if (!b->component) {
        b->component = new_component(k);
        b->coming = new_clock(k, SHARED_CLOCKS);
        b->done = new_clock(k, SHARED_CLOCKS);
        b->uses = new_clock(k, 1);
    } else {
        require_unused(w, operation, cta, bar);
        b->base += (int32_t)b->phase + 1;
        b->phase = 0;
        b->fenced = 0;
        b->generation++;
        memset(b->coming, 0, sizeof(int32_t) * (size_t)(SHARED_CLOCKS * k->size));
        memset(b->done, 0, sizeof(int32_t) * (size_t)(SHARED_CLOCKS * k->size));
        memset(b->uses, 0, sizeof(int32_t) * (size_t)k->size);
    }
    b->init_component = a->component;
    b->init_epoch = fc_epoch_of(a);
    int32_t capacity = a->initialised_capacity;
    a->initialised = fc_grown(a->initialised, a->initialised_count, &capacity, sizeof(BarrierClocks *));
    a->initialised_generation =
        fc_grown(a->initialised_generation, a->initialised_count, &a->initialised_capacity, sizeof(int32_t));
    a->initialised[a->initialised_count] = b;
    a->initialised_generation[a->initialised_count++] = b->generation;
    write_barrier(w, operation, cta, bar, 1);
}

void fc_inval(Warp *w, int32_t operation, Cta *cta, MBarrier *bar) {
    require_unused(w, operation, cta, bar);
    write_barrier(w, operation, cta, bar, 0);
}

static void next_round(Checks *k, BarrierClocks *b, int64_t generation) {
    size_t bytes = sizeof(int32_t) * (size_t)(SHARED_CLOCKS * k->size);
    if (!b->coming) b->coming = new_clock(k, SHARED_CLOCKS);
    if (b->phase == generation) return;
    int slot = (int)(b->phase % ROUNDS);
    if (!b->rounds[slot]) b->rounds[slot] = new_clock(k, SHARED_CLOCKS);
    memcpy(b->rounds[slot], b->coming, bytes);
    b->round_of[slot] = b->phase;
    memset(b->coming, 0, bytes);
    b->phase = generation;
}

static void acquire_round(Checks *k, Agent *a, BarrierClocks *b, int64_t round) {
    int slot = (int)(round % ROUNDS);
    if (b->rounds[slot] && b->round_of[slot] == round) merge_shared(k, a->clock, b->rounds[slot]);
}

void fc_named_arrive(Warp *w, int32_t number, int64_t generation) {
    Checks *k = w->cluster->checks;
    BarrierClocks *b = &k->named[w->cta->rank * 16 + number];
    next_round(k, b, generation);
    release(k, fc_agent(w), b, 0);
}

void fc_named_wait(Warp *w, int32_t number, int64_t round) {
    Checks *k = w->cluster->checks;
    BarrierClocks *b = &k->named[w->cta->rank * 16 + number];
    next_round(k, b, w->cta->named[number].generation);
    acquire_round(k, fc_agent(w), b, round);
}

void fc_cluster_arrive(Warp *w, int relaxed) {
    Checks *k = w->cluster->checks;
    next_round(k, &k->whole, w->cluster->generation);
    release(k, fc_agent(w), &k->whole, relaxed);
}

void fc_cluster_wait(Warp *w, int64_t round) {
    Checks *k = w->cluster->checks;
    next_round(k, &k->whole, w->cluster->generation);
    acquire_round(k, fc_agent(w), &k->whole, round);
}

/* -- copies that an mbarrier or a bulk group tracks */

/* Note that a copy's end is part of an mbarrier's current phase. */
static BarrierClocks *tracked(Checks *k, const Issue *i, Cta *owner, MBarrier *bar) {
    BarrierClocks *b = sync_phase(k, owner, bar);
    int32_t epoch = b->base + (int32_t)bar->phase + 1;
    require_initialised(k, b, i->clock, k->agents[i->warp].component, i->warp, i->operation, owner, bar);
    if (!b->fenced) tell_barrier(k, R_BARRIER_FENCE, i->warp, i->operation, owner, bar);
    merge_shared(k, b->coming, i->clock);
    for (int r = 0; r < SHARED_CLOCKS; r++) fc_row(k, b->coming, r)[b->component] = epoch;
    b->uses[b->component] = epoch;
    return b;
}

void fc_landed(const Issue *i, Cluster *c, Cta *cta, int64_t start, int64_t bytes, Cta *owner, MBarrier *bar,
               int32_t what) {
    Checks *k = c->checks;
    BarrierClocks *b = tracked(k, i, owner, bar);
    int32_t epoch = b->base + (int32_t)bar->phase + 1, number;
    Shadow *s = &k->shared[cta->rank];
    if ((start | bytes) & 15) {
        Access a = {b->component, epoch, i->epoch, i->operation, i->warp, BY_LOAD, what};
        number = fc_write_part(k, s, a, (int32_t)start, (int32_t)bytes, i->clock);
    } else {
        Granules g = fc_bytes(s, start, bytes);
        number = fc_access(k, s, &g, 1, i, b->component, epoch, BY_LOAD, what, 0, 1);
    }
    fc_reach_number(k, number, cta->rank);
}

void fc_fetched(const Issue *i, Cluster *c, Cta *cta, int64_t start, int64_t bytes, Cta *owner, MBarrier *bar,
                int32_t what) {
    Checks *k = c->checks;
    BarrierClocks *b = tracked(k, i, owner, bar);
    Shadow *s = &k->shared[cta->rank];
    Granules g = fc_bytes(s, start, bytes);
    int32_t epoch = b->base + (int32_t)bar->phase + 1;
    fc_reach_number(k, fc_access(k, s, &g, 0, i, b->component, epoch, BY_LOAD, what, 0, 1), cta->rank);
}

void fc_completed(const Issue *i, Cluster *c, Cta *owner, MBarrier *bar, int32_t component, int32_t epoch) {
    Checks *k = c->checks;
    BarrierClocks *b = tracked(k, i, owner, bar);
    for (int r = 0; r < SHARED_CLOCKS; r++) {
        int32_t *at = &fc_row(k, b->coming, r)[component];
        if (*at < epoch) *at = epoch;
    }
}

void fc_bulk_read(Warp *w, int32_t operation, int32_t lane, int64_t start, int64_t bytes, int32_t what,
                  int initialised) {
    Checks *k = w->cluster->checks;
    Agent *a = fc_agent(w);
    Shadow *s = &k->shared[w->cta->rank];
    int32_t component = fc_own(k, a, BY_BULK + lane);
    Issue i = fc_issue(w, operation);
    Granules g = fc_bytes(s, start, bytes);
    int32_t number = fc_access(k, s, &g, 0, &i, component, a->groups[BY_BULK + lane] + 1, BY_BULK, what, 1, initialised);
    fc_reach_number(k, number, w->cta->rank);
}

void fc_bulk_commit(Warp *w, uint32_t lanes) {
    Agent *a = fc_agent(w);
    for (; lanes; lanes &= lanes - 1) {
        int32_t family = BY_BULK + (int32_t)low_lane(lanes);
        if (a->own[family]) fc_close(w->cluster->checks, a, family);
    }
}

void fc_bulk_wait(Warp *w, uint32_t lanes, int32_t left) {
    for (; lanes; lanes &= lanes - 1)
        fc_awaited(w->cluster->checks, fc_agent(w), BY_BULK + (int32_t)low_lane(lanes), left);
}

/* -- the end */

void fc_finish(Checks *k) {
    int32_t ctas = k->cluster->size;
    for (int32_t n = 0; n < k->ordered; n++) {
        Access a = k->outstanding[k->order[n]];
        int32_t rank = k->order[n] % ctas, known = 0, inside = 0;
        for (int32_t i = rank * k->warps_per_cta; i < (rank + 1) * k->warps_per_cta; i++) {
            int32_t seen = fc_row(k, k->agents[i].clock, LENIENT)[a.component];
            known = seen > known ? seen : known;
            inside |= k->agents[i].component == a.component;
        }
        if (inside || known >= a.epoch) continue;
        Report *r = fc_blank(k, R_UNAWAITED, a.warp, a.operation);
        r->by = a;
        r->what = a.what;
        r->cta = rank;
        k->call();
    }
}

/* -- for Python */

int32_t fc_component(const Warp *w) { return fc_agent(w)->component; }

int32_t fc_epoch(const Warp *w) { return fc_epoch_of(fc_agent(w)); }

const int32_t *fc_clock(const Warp *w) { return fc_agent(w)->clock; }

int32_t fc_size(const Checks *k) { return k->size; }

int32_t fc_own_of(Warp *w, int32_t family) { return fc_own(w->cluster->checks, fc_agent(w), family); }

int32_t fc_open_group(Warp *w, int32_t family) { return fc_agent(w)->groups[family] + 1; }

int32_t fc_close_of(Warp *w, int32_t family) { return fc_close(w->cluster->checks, fc_agent(w), family); }

void fc_awaited_of(Warp *w, int32_t family, int32_t left) {
    fc_awaited(w->cluster->checks, fc_agent(w), family, left);
}

/* which: 0 loading, 1 touched, 2 held by a wgmma */
uint64_t *fc_registers_of(Warp *w, int32_t which) {
    Agent *a = fc_agent(w);
    return which == 0 ? a->loading : which == 1 ? a->touched : a->flying_mask;
}

/* kind: 0 a copy lands, 1 its source was read */
void fc_copy_done(Warp *w, int32_t operation, int32_t issued, const int32_t *clock, Cta *cta, int64_t start,
                  int64_t bytes, Cta *owner, MBarrier *bar, int32_t what, int32_t kind) {
    Issue i = {w->number, operation, issued, clock};
    (kind ? fc_fetched : fc_landed)(&i, w->cluster, cta, start, bytes, owner, bar, what);
}

void fc_arrived(Warp *w, int32_t operation, int32_t issued, const int32_t *clock, Cta *owner, MBarrier *bar,
                int32_t component, int32_t epoch) {
    Issue i = {w->number, operation, issued, clock};
    fc_completed(&i, w->cluster, owner, bar, component, epoch);
}

void fc_written(Warp *w, int32_t first, int32_t count, uint32_t mask) {
    if (mask) memset(w->written + first, 1, (size_t)count);
}

void fc_copy_written(Warp *w, int32_t to, int32_t of) { w->written[to] = of < 0 ? 1 : w->written[of]; }
