/* Races in global memory, over all clusters of a launch. Semantics: checks_global.py. */

#include <stdlib.h>

#include "checks.h"

typedef struct {
    int32_t mask, number, write;
} GlobalPart;

typedef struct {
    GlobalPart *parts;
    int32_t count, capacity;
} GlobalParts;

typedef struct {
    uint64_t first; /* address of the first granule */
    int64_t granules;
    int32_t *write, *reader, *other; /* numbers of accesses by granule; null before the first access */
    int32_t *parts_of;               /* 1 + number of a granule's accesses in part; null before the first */
    GlobalParts *parts;
    int32_t parts_count, parts_capacity;
} GlobalRegion;

struct Globals {
    GlobalAccess *records;
    GlobalRegion *regions;
    int32_t *released; /* by cluster: the last access before its last atomic */
    int32_t count, capacity, region_count, cluster, clusters_capacity, acquired;
    int32_t *full; /* scratch */
    GlobalPart *rest;
    int32_t full_count, full_capacity, rest_count, rest_capacity;
};

Globals *fg_new(const Machine *m) {
    Globals *g = calloc(1, sizeof(Globals));
    g->records = calloc(1024, sizeof(GlobalAccess));
    g->capacity = 1024;
    g->count = 1;
    g->cluster = -1;
    g->region_count = m->region_count;
    g->regions = calloc((size_t)(m->region_count ? m->region_count : 1), sizeof(GlobalRegion));
    for (int32_t i = 0; i < m->region_count; i++) {
        GlobalRegion *r = &g->regions[i];
        r->first = m->regions[i].address & ~15ull;
        r->granules = (int64_t)((m->regions[i].address + (uint64_t)m->regions[i].nbytes - r->first + 15) >> 4);
    }
    return g;
}

void fg_free(Globals *g) {
    for (int32_t i = 0; i < g->region_count; i++) {
        GlobalRegion *r = &g->regions[i];
        for (int32_t n = 0; n < r->parts_count; n++) free(r->parts[n].parts);
        free(r->write);
        free(r->parts_of);
        free(r->parts);
    }
    free(g->regions);
    free(g->records);
    free(g->released);
    free(g->full);
    free(g->rest);
    free(g);
}

/* The next cluster runs. */
void fg_begin(Globals *g) {
    g->cluster++;
    g->released = fc_grown(g->released, g->cluster, &g->clusters_capacity, sizeof(int32_t));
    g->released[g->cluster] = 0;
    g->acquired = 0;
}

static int32_t number_of(Globals *g, Warp *w, int32_t operation, int write, int atomic, int32_t what) {
    Agent *a = fc_agent(w);
    int32_t slot = (2 * operation + write) & (NUMBERS - 1), found = a->global_number[slot], epoch = fc_epoch_of(a);
    const GlobalAccess *r = &g->records[found];
    if (found && r->operation == operation && r->epoch == epoch && r->write == write && r->what == what) return found;
    if (g->count == g->capacity) {
        g->capacity *= 2;
        g->records = realloc(g->records, sizeof(GlobalAccess) * (size_t)g->capacity);
    }
    g->records[g->count] =
        (GlobalAccess){g->cluster, w->number, a->component, epoch, operation, what, atomic, write};
    return a->global_number[slot] = g->count++;
}

static inline int same_owner(const Globals *g, int32_t a, int32_t b) {
    return g->records[a].cluster == g->records[b].cluster && g->records[a].component == g->records[b].component && a && b;
}

static void test(Checks *k, Globals *g, const Warp *w, int32_t other, int32_t mine) {
    const GlobalAccess *a = &g->records[other], *b = &g->records[mine];
    if (!other || other == mine || (a->atomic && b->atomic)) return;
    if (a->cluster != b->cluster) {
        if (g->acquired && other <= g->released[a->cluster]) return;
    } else if (a->component == b->component || fc_agent(w)->clock[KNOWN * k->size + a->component] >= a->epoch) {
        return;
    }
    fc_global_race(k, w->number, a, b);
}

/* Granules of spans in full (g->full) and in part (g->rest). */
static void cover(Globals *g, const int64_t *offsets, int32_t count, int32_t bytes) {
    int64_t low = bytes;
    for (int32_t i = 0; i < count; i++) low |= offsets[i];
    int32_t per = bytes / 16 + 2;
    if (g->full_capacity < count * per) {
        g->full_capacity = count * per;
        g->rest_capacity = count * per;
        g->full = realloc(g->full, sizeof(int32_t) * (size_t)g->full_capacity);
        g->rest = realloc(g->rest, sizeof(GlobalPart) * (size_t)g->rest_capacity);
    }
    g->full_count = g->rest_count = 0;
    if (bytes >= 16 && !(low & 15)) {
        for (int32_t i = 0; i < count; i++)
            for (int32_t j = 0; j < bytes; j += 16) g->full[g->full_count++] = (int32_t)((offsets[i] + j) >> 4);
        return;
    }
    int merged = bytes < 16;
    for (int32_t i = 0; i < count; i++) {
        for (int64_t at = offsets[i], end = at + bytes; at < end;) {
            int64_t granule = at >> 4, stop = (granule + 1) << 4 < end ? (granule + 1) << 4 : end;
            int32_t mask = ((1 << (stop - at)) - 1) << (at & 15), n = merged ? g->rest_count - 1 : -1;
            while (n >= 0 && g->rest[n].number != granule) n--;
            if (n < 0) g->rest[n = g->rest_count++] = (GlobalPart){0, (int32_t)granule, 0};
            g->rest[n].mask |= mask;
            at = stop;
        }
    }
    int32_t kept = 0;
    for (int32_t n = 0; n < g->rest_count; n++) {
        if (g->rest[n].mask == WHOLE) g->full[g->full_count++] = g->rest[n].number;
        else g->rest[kept++] = g->rest[n];
    }
    g->rest_count = kept;
}

static void test_all(Checks *k, Globals *g, const Warp *w, const int32_t *numbers, int32_t mine) {
    int32_t last = 0;
    for (int32_t i = 0; i < g->full_count; i++) {
        int32_t number = numbers[g->full[i]];
        if (number != last) test(k, g, w, number, mine);
        last = number;
    }
}

static void test_parts(Checks *k, Globals *g, const Warp *w, const GlobalRegion *r, int32_t granule, int32_t mask,
                       int write, int32_t mine) {
    if (!r->parts_of || !r->parts_of[granule]) return;
    const GlobalParts *p = &r->parts[r->parts_of[granule] - 1];
    for (int32_t i = 0; i < p->count; i++)
        if (p->parts[i].mask & mask && (write || p->parts[i].write)) test(k, g, w, p->parts[i].number, mine);
}

static void note_part(Globals *g, GlobalRegion *r, int32_t granule, GlobalPart new) {
    if (!r->parts_of) r->parts_of = calloc((size_t)r->granules, sizeof(int32_t));
    if (!r->parts_of[granule]) {
        r->parts = fc_grown(r->parts, r->parts_count, &r->parts_capacity, sizeof(GlobalParts));
        r->parts[r->parts_count] = (GlobalParts){0};
        r->parts_of[granule] = ++r->parts_count;
    }
    GlobalParts *p = &r->parts[r->parts_of[granule] - 1];
    int32_t kept = 0, same = 0, mine = 0, first = -1;
    for (int32_t i = 0; i < p->count && !new.write; i++) {
        if (p->parts[i].write || p->parts[i].mask != new.mask) continue;
        if (first < 0) first = i;
        same++;
        mine |= same_owner(g, p->parts[i].number, new.number);
    }
    for (int32_t i = 0; i < p->count; i++) {
        GlobalPart old = p->parts[i];
        int alike = !old.write && old.mask == new.mask;
        int gone = new.write ? !(old.mask & ~new.mask)
                             : mine ? alike && same_owner(g, old.number, new.number) : same > 1 && i == first;
        if (!gone) p->parts[kept++] = old;
    }
    p->count = kept;
    p->parts = fc_grown(p->parts, p->count, &p->capacity, sizeof(GlobalPart));
    p->parts[p->count++] = new;
}

/* A warp accesses `bytes` at each of `count` addresses, all inside of region `number`. */
void fg_access(Warp *w, int32_t operation, int32_t number, const uint64_t *addresses, int32_t count, int32_t bytes,
               int32_t write, int32_t atomic, int32_t what) {
    Checks *k = w->cluster->checks;
    Globals *g = k->globals;
    GlobalRegion *r = &g->regions[number];
    if (!w->cluster->machine->regions[number].writable || count <= 0 || bytes <= 0) return;
    if (!r->write) {
        r->write = calloc(3 * (size_t)r->granules, sizeof(int32_t));
        r->reader = r->write + r->granules;
        r->other = r->reader + r->granules;
    }
    int64_t few[128], *offsets = count <= 128 ? few : malloc(sizeof(int64_t) * (size_t)count);
    for (int32_t i = 0; i < count; i++) offsets[i] = (int64_t)(addresses[i] - r->first);
    cover(g, offsets, count, bytes);
    if (offsets != few) free(offsets);
    int32_t mine = number_of(g, w, operation, write, atomic, what);
    test_all(k, g, w, r->write, mine);
    if (write) {
        test_all(k, g, w, r->reader, mine);
        test_all(k, g, w, r->other, mine);
    }
    for (int32_t i = 0; r->parts_of && i < g->full_count; i++) test_parts(k, g, w, r, g->full[i], WHOLE, write, mine);
    for (int32_t i = 0; i < g->rest_count; i++) {
        int32_t granule = g->rest[i].number;
        test(k, g, w, r->write[granule], mine);
        if (write) {
            test(k, g, w, r->reader[granule], mine);
            test(k, g, w, r->other[granule], mine);
        }
        test_parts(k, g, w, r, granule, g->rest[i].mask, write, mine);
    }
    for (int32_t i = 0; i < g->full_count; i++) {
        int32_t granule = g->full[i];
        if (write) {
            r->write[granule] = mine;
            r->reader[granule] = r->other[granule] = 0;
            if (r->parts_of && r->parts_of[granule]) r->parts[r->parts_of[granule] - 1].count = 0;
            continue;
        }
        int32_t before = r->reader[granule];
        if (before != mine && !same_owner(g, before, mine)) r->other[granule] = before;
        r->reader[granule] = mine;
    }
    for (int32_t i = 0; i < g->rest_count; i++)
        note_part(g, r, g->rest[i].number, (GlobalPart){g->rest[i].mask, mine, write});
    if (atomic) {
        g->acquired = 1;
        g->released[g->cluster] = g->count - 1;
    }
}
