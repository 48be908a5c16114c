/* Shadow memory of the sanitizer: who touched which granule last. Semantics: checks_shadow.py. */

#include <stdlib.h>

#include "checks.h"

/* -- accesses */

int32_t fc_add(Checks *k, Access a) {
    if (k->accesses_count == k->accesses_capacity) {
        k->accesses_capacity *= 2;
        k->accesses = realloc(k->accesses, sizeof(Access) * (size_t)k->accesses_capacity);
    }
    k->accesses[k->accesses_count] = a;
    return k->accesses_count++;
}

int32_t fc_record(Checks *k, int32_t component, int32_t epoch, int32_t family, int32_t warp, int32_t issued,
                  int32_t operation, int32_t what) {
    return fc_add(k, (Access){component, epoch, issued, operation, warp, family, what});
}

static void conflict(Checks *k, const Shadow *s, int32_t by, int32_t number, const int32_t *clock) {
    const Access *a = &k->accesses[by], *other = &k->accesses[number];
    const int32_t *lenient = fc_const_row(k, clock, LENIENT);
    Report *r = fc_blank(k, R_CONFLICT, a->warp, a->operation);
    r->by = *a;
    r->against = *other;
    r->what = a->what;
    r->tensor = s->tensor;
    r->flags = lenient[other->component] >= other->epoch;
    if (lenient[k->agents[other->warp].component] >= other->issued) r->flags |= 2;
    fc_tell(k);
}

/* -- granules */

static void set_pages(uint64_t *pages, int64_t first, int64_t last) {
    for (int64_t p = first; p <= last; p++) pages[p >> 6] |= 1ull << (p & 63);
}

static void find_pages(const Shadow *s, Granules *g) {
    memset(g->pages, 0, sizeof(g->pages));
    if (g->list) {
        for (int32_t i = 0; i < g->count; i++) {
            int64_t p = (g->start + g->list[i]) >> s->page_shift;
            g->pages[p >> 6] |= 1ull << (p & 63);
        }
        return;
    }
    for (int32_t r = 0; r < g->runs; r++) {
        int64_t first = g->start + (int64_t)r * g->stride;
        set_pages(g->pages, first >> s->page_shift, (first + g->length - 1) >> s->page_shift);
    }
}

static int meet(const uint64_t *a, const uint64_t *b) {
    return ((a[0] & b[0]) | (a[1] & b[1]) | (a[2] & b[2]) | (a[3] & b[3])) != 0;
}

static int32_t newest(const int32_t *last, const Granules *g) {
    int32_t best = 0;
    last += g->start;
    if (g->list) {
        const int32_t *list = g->list;
        for (int32_t i = 0; i < g->count; i++) best = last[list[i]] > best ? last[list[i]] : best;
        return best;
    }
    for (int32_t r = 0; r < g->runs; r++, last += g->stride)
        for (int32_t i = 0; i < g->length; i++) best = last[i] > best ? last[i] : best;
    return best;
}

static void put(int32_t *restrict last, const Granules *g, int32_t value) {
    last += g->start;
    if (g->list) {
        for (int32_t i = 0; i < g->count; i++) last[g->list[i]] = value;
        return;
    }
    for (int32_t r = 0; r < g->runs; r++, last += g->stride)
        for (int32_t i = 0; i < g->length; i++) last[i] = value;
}

static int all_valid(const Shadow *s, const Granules *g) {
    const int32_t *valid = s->valid + g->start;
    int32_t all = WHOLE;
    if (g->list) {
        for (int32_t i = 0; i < g->count; i++) all &= valid[g->list[i]];
        return all == WHOLE;
    }
    for (int32_t r = 0; r < g->runs; r++, valid += g->stride)
        for (int32_t i = 0; i < g->length; i++) all &= valid[i];
    return all == WHOLE;
}

static Row *row_for(Checks *k, Shadow *s, int write, int32_t component, int generic) {
    Table *t = write ? &s->writes : &s->reads;
    int32_t found = t->row_of[component];
    if (!found) {
        t->rows = fc_grown(t->rows, t->count, &t->capacity, sizeof(Row));
        t->rows[t->count] = (Row){.component = component, .generic = generic};
        t->rows[t->count].last = fc_keep(k, sizeof(int32_t) * (size_t)s->granules);
        t->row_of[component] = (int16_t)(found = ++t->count);
    }
    return &t->rows[found - 1];
}

/* -- accesses to parts of granules */

static void compare_fine(Checks *k, Shadow *s, int64_t granule, int32_t mask, int write, int32_t number,
                         const int32_t *clock, const int32_t *known, const int32_t *generic, int32_t own) {
    if (!s->fine_of || !s->fine_of[granule]) return;
    const Fine *f = &s->fine[s->fine_of[granule] - 1];
    for (int32_t i = 0; i < f->count; i++) {
        const Part *p = &f->parts[i];
        if (p->component == own || !(write || p->write) || !(p->mask & mask)) continue;
        int32_t limit = (p->write ? generic : known)[p->component];
        if (k->accesses[p->number].epoch > limit) conflict(k, s, number, p->number, clock);
    }
}

Fine *fc_parts_at(Shadow *s, int64_t granule) {
    if (!s->fine_of[granule]) {
        s->fine = fc_grown(s->fine, s->fine_count, &s->fine_capacity, sizeof(Fine));
        s->fine[s->fine_count] = (Fine){0};
        s->fine_of[granule] = (int16_t)++s->fine_count;
        int64_t p = granule >> s->page_shift;
        s->fine_pages[p >> 6] |= 1ull << (p & 63);
    }
    return &s->fine[s->fine_of[granule] - 1];
}

void fc_drop_parts(Fine *f, int32_t component, int write, int32_t mask) {
    int32_t kept = 0;
    for (int32_t i = 0; i < f->count; i++) {
        Part p = f->parts[i];
        if (p.component != component || p.write != write || p.mask & ~mask) f->parts[kept++] = p;
    }
    f->count = kept;
}

void fc_add_part(Fine *f, Part p) {
    f->parts = fc_grown(f->parts, f->count, &f->capacity, sizeof(Part));
    f->parts[f->count++] = p;
}

static void access_part(Checks *k, Shadow *s, int64_t granule, int32_t mask, int write, int32_t number,
                        const int32_t *clock, int32_t own) {
    const int32_t *known = fc_const_row(k, clock, KNOWN);
    Table *tables[2] = {&s->writes, &s->reads};
    for (int t = 0; t < (write ? 2 : 1); t++)
        for (int32_t i = 0; i < tables[t]->count; i++) {
            const Row *r = &tables[t]->rows[i];
            int32_t last = r->last[granule];
            if (r->component != own && k->accesses[last].epoch > known[r->component]) conflict(k, s, number, last, clock);
        }
    compare_fine(k, s, granule, mask, write, number, clock, known, known, own);
    Fine *f = fc_parts_at(s, granule);
    fc_drop_parts(f, own, write, mask);
    fc_add_part(f, (Part){own, write, mask, number});
    if (write) s->valid[granule] |= mask;
}

/* -- accesses to whole granules */

static void access_whole(Checks *k, Shadow *s, const Granules *g, int write, int32_t number, const int32_t *clock,
                         const int32_t *known, const int32_t *generic, int32_t own) {
    Table *tables[2] = {&s->writes, &s->reads};
    for (int t = 0; t < (write ? 2 : 1); t++) {
        for (int32_t i = 0; i < tables[t]->count; i++) {
            const Row *r = &tables[t]->rows[i];
            if (r->component == own || !meet(r->pages, g->pages)) continue;
            int32_t limit = t == 0 && r->generic ? generic[r->component] : known[r->component];
            int32_t last = newest(r->last, g);
            if (k->accesses[last].epoch > limit) conflict(k, s, number, last, clock);
        }
    }
    if (meet(s->fine_pages, g->pages)) {
        int64_t n = g->list ? g->count : (int64_t)g->runs * g->length;
        for (int64_t i = 0; i < n; i++) {
            int64_t granule = g->start + (g->list ? g->list[i] : i / g->length * g->stride + i % g->length);
            compare_fine(k, s, granule, WHOLE, write, number, clock, known, generic, own);
        }
    }
    const Access *a = &k->accesses[number];
    Row *r = row_for(k, s, write, a->component, a->family == BY_WARP || a->family == BY_COPY);
    put(r->last, g, number);
    for (int i = 0; i < PAGE_WORDS; i++) r->pages[i] |= g->pages[i];
    if (write) put(s->valid, g, WHOLE);
}

int32_t fc_access(Checks *k, Shadow *s, const Granules *g, int write, const Issue *i, int32_t component,
                  int32_t epoch, int32_t family, int32_t what, int ordered, int initialised) {
    int32_t number = fc_add(k, (Access){component, epoch, i->epoch, i->operation, i->warp, family, what});
    const int32_t *known = fc_const_row(k, i->clock, s->tensor ? TENSOR : KNOWN);
    const int32_t *generic = fc_const_row(k, i->clock, s->tensor ? LENIENT : PROXIED);
    if (!write && initialised && !all_valid(s, g)) {
        Report *r = fc_blank(k, R_UNINITIALISED, i->warp, i->operation);
        r->what = what;
        r->tensor = s->tensor;
        r->flags = 1;
        fc_tell(k);
    }
    access_whole(k, s, g, write, number, i->clock, known, generic, ordered ? component : -1);
    return number;
}

void fc_reach(Checks *k, const Access *access, int32_t rank) {
    int32_t place = access->component * k->cluster->size + rank;
    if (!k->outstanding[place].component) k->order[k->ordered++] = place;
    k->outstanding[place] = *access;
    const Warp *const *warps = (const Warp *const *)k->cluster->warps + rank * k->warps_per_cta;
    for (int32_t i = 0; i < k->warps_per_cta; i++)
        if (warps[i]->state != DONE) return;
    Report *r = fc_blank(k, R_EXITED, access->warp, access->operation);
    r->what = access->what;
    r->cta = rank;
    fc_tell(k);
}

void fc_reach_number(Checks *k, int32_t number, int32_t rank) {
    Access a = k->accesses[number];
    fc_reach(k, &a, rank);
}

void fc_touch_other(Checks *k, const Agent *a, int32_t operation, int32_t rank, int32_t what) {
    Access access = {a->component, fc_epoch_of(a), fc_epoch_of(a), operation, a->warp, BY_WARP, what};
    fc_reach(k, &access, rank);
}

void fc_touch(Warp *w, int32_t operation, int32_t rank, int32_t what) {
    fc_touch_other(w->cluster->checks, fc_agent(w), operation, rank, what);
}

/* The operation of a warp's own access at the current instruction and epoch. */
static int32_t number_of(Checks *k, Agent *a, int32_t operation, int write) {
    int32_t slot = (2 * operation + write) & (NUMBERS - 1), found = a->cached_number[slot];
    if (a->cached_operation[slot] == 2 * operation + write && found && k->accesses[found].epoch == fc_epoch_of(a))
        return found;
    a->cached_operation[slot] = 2 * operation + write;
    int32_t epoch = fc_epoch_of(a);
    return a->cached_number[slot] =
        fc_add(k, (Access){a->component, epoch, epoch, operation, a->warp, BY_WARP, write ? A_WRITE : A_READ});
}

enum { MAX_COVER = 1024 };

typedef struct {
    int32_t full[MAX_COVER], granules[MAX_COVER], masks[MAX_COVER];
    int32_t full_count, count;
} Cover;

/* What lanes cover together: granules in full, and others in part. */
static void cover(Cover *v, const int32_t *offsets, int32_t lanes, int32_t bytes) {
    int32_t low = 0;
    v->full_count = v->count = 0;
    for (int32_t i = 0; i < lanes; i++) low |= offsets[i];
    if (bytes >= 16 && !((low | bytes) & 15)) {
        for (int32_t i = 0; i < lanes; i++)
            for (int32_t j = 0; j < bytes; j += 16) v->full[v->full_count++] = (offsets[i] + j) >> 4;
        return;
    }
    for (int32_t i = 0; i < lanes; i++) {
        for (int32_t at = offsets[i], end = offsets[i] + bytes; at < end;) {
            int32_t granule = at >> 4, stop = (granule + 1) << 4 < end ? (granule + 1) << 4 : end, n = v->count - 1;
            int32_t mask = ((1 << (stop - at)) - 1) << (at & 15);
            while (n >= 0 && v->granules[n] != granule) n--;
            if (n < 0) {
                n = v->count++;
                v->granules[n] = granule;
                v->masks[n] = 0;
            }
            v->masks[n] |= mask;
            at = stop;
        }
    }
    int32_t kept = 0;
    for (int32_t n = 0; n < v->count; n++) {
        if (v->masks[n] == WHOLE) {
            v->full[v->full_count++] = v->granules[n];
        } else {
            v->granules[kept] = v->granules[n];
            v->masks[kept++] = v->masks[n];
        }
    }
    v->count = kept;
}

static void access_cover(Checks *k, Shadow *s, const Cover *v, int write, int32_t number, const int32_t *clock,
                         int32_t own) {
    const int32_t *known = fc_const_row(k, clock, KNOWN);
    if (v->full_count) {
        Granules g = {.list = v->full, .count = v->full_count};
        find_pages(s, &g);
        access_whole(k, s, &g, write, number, clock, known, known, own);
    }
    for (int32_t i = 0; i < v->count; i++)
        access_part(k, s, v->granules[i], v->masks[i], write, number, clock, own);
}

void fc_shared(Warp *w, int32_t operation, Cta *cta, const int32_t *offsets, int32_t lanes, int32_t bytes, int write) {
    Checks *k = w->cluster->checks;
    Agent *a = fc_agent(w);
    Shadow *s = &k->shared[cta->rank];
    int32_t number = number_of(k, a, operation, write), most = MAX_COVER / (bytes / 16 + 2);
    for (; lanes > 0; lanes -= most, offsets += most) {
        Cover v;
        cover(&v, offsets, lanes < most ? lanes : most, bytes);
        if (!write) {
            int missing = 0;
            for (int32_t i = 0; i < v.full_count; i++) missing |= s->valid[v.full[i]] != WHOLE;
            for (int32_t i = 0; i < v.count; i++) missing |= v.masks[i] & ~s->valid[v.granules[i]];
            if (missing) {
                fc_blank(k, R_UNINITIALISED, w->number, operation);
                fc_tell(k);
            }
        }
        access_cover(k, s, &v, write, number, a->clock, a->component);
    }
    if (cta != w->cta) fc_touch_other(k, a, operation, cta->rank, A_REMOTE);
}

/* cp.async of some lanes, a write that its group tracks. */
void fc_copied(Warp *w, int32_t operation, const int32_t *offsets, int32_t lanes, int32_t bytes, int32_t what) {
    Checks *k = w->cluster->checks;
    Agent *a = fc_agent(w);
    int32_t component = fc_own(k, a, BY_COPY);
    int32_t number = fc_add(
        k, (Access){component, a->groups[BY_COPY] + 1, fc_epoch_of(a), operation, a->warp, BY_COPY, what});
    Cover v;
    cover(&v, offsets, lanes, bytes);
    access_cover(k, &k->shared[w->cta->rank], &v, 1, number, a->clock, component);
}

/* An atomic on shared memory: ordered with the other atomics there, not compared. */
void fc_atomic(Warp *w, int32_t operation, Cta *cta, int32_t start, int32_t bytes, int32_t what) {
    Checks *k = w->cluster->checks;
    for (int32_t b = start; b < start + bytes; b++) k->shared[cta->rank].valid[b >> 4] |= 1 << (b & 15);
    if (cta != w->cta) fc_touch_other(k, fc_agent(w), operation, cta->rank, what);
}

/* An access of Python's: a list of granules. */
int32_t fc_access_list(Warp *w, int32_t tensor, int32_t rank, const int32_t *list, int32_t count, int32_t write,
                       int32_t operation, int32_t issued, const int32_t *clock, int32_t component, int32_t epoch,
                       int32_t family, int32_t what, int32_t ordered, int32_t initialised) {
    Checks *k = w->cluster->checks;
    Shadow *s = tensor ? &k->tensor[rank] : &k->shared[rank];
    Issue i = {w->number, operation, issued, clock};
    Granules g = {.list = list, .count = count};
    find_pages(s, &g);
    return fc_access(k, s, &g, write, &i, component, epoch, family, what, ordered, initialised);
}

void fc_forget(Checks *k, int32_t tensor, int32_t rank, const int32_t *list, int32_t count) {
    Shadow *s = tensor ? &k->tensor[rank] : &k->shared[rank];
    for (int32_t i = 0; i < count; i++) s->valid[list[i]] = 0;
}

void fc_get_access(Checks *k, int32_t number, Access *out) { *out = k->accesses[number]; }

/* A write of part of a granule by a copy; the number of the access. */
int32_t fc_write_part(Checks *k, Shadow *s, Access a, int32_t start, int32_t bytes, const int32_t *clock) {
    int32_t number = fc_add(k, a);
    Cover v;
    cover(&v, &start, 1, bytes);
    for (int32_t n = 0; n < v.count; n++)
        access_part(k, s, v.granules[n], v.masks[n], 1, number, clock, a.component);
    return number;
}

Granules fc_bytes(const Shadow *s, int64_t start, int64_t bytes) {
    Granules g = {.start = start >> 4, .length = (int32_t)(((start + bytes) >> 4) - (start >> 4)), .runs = 1};
    if (g.length > 0) find_pages(s, &g);
    return g;
}
