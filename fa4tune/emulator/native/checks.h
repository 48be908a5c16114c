/* The sanitizer's state: vector clocks, shadow memory and what the machine tells them. Meaning: checks_cluster.py,
 * checks_shadow.py and checks_tensor.py, which are the reference. Findings are named by Python (checks.py). */
#ifndef FA4TUNE_CHECKS_H
#define FA4TUNE_CHECKS_H

#include "runtime.h"

enum { KNOWN, PROXIED, LENIENT, TENSOR, CLOCKS };
enum { SHARED_CLOCKS = 3, ROUNDS = 8, PAGE_WORDS = 4, NUMBERS = 64 };
enum { TMEM_COLUMNS = 512, TMEM_GROUPS = 8, TMEM_GRANULES = TMEM_COLUMNS * TMEM_GROUPS };
enum { GUARD_EPOCH = 1 << 30, WHOLE = 0xFFFF };

/* Families of components; the bulk groups of lane n are BY_BULK + n. */
enum { BY_WARP, BY_WGMMA, BY_LOAD, BY_MMA, BY_TMEM_LOAD, BY_TMEM_STORE, BY_COPY, BY_BARRIER, BY_BULK, FAMILIES = BY_BULK + 32 };

/* What an access is, in words of checks.py; those of Python come after. */
enum {
    A_WRITE, A_READ, A_TENSOR_LOAD, A_TENSOR_STORE, A_WGMMA_A, A_WGMMA_B, A_TMEM_LOAD, A_TMEM_STORE, A_MMA_B, A_MMA_A,
    A_MMA_TMEM, A_MMA_D, A_COMMIT, A_BARRIER, A_MBARRIER_OF, A_REMOTE, A_GLOBAL_READ, A_GLOBAL_WRITE
};

/* Kinds of reports. */
enum {
    R_CONFLICT, R_UNINITIALISED, R_INIT_RACE, R_BARRIER_FENCE, R_REUSE, R_EXITED, R_UNAWAITED, R_UNSET, R_ACCUMULATOR,
    R_FLYING, R_LOADING, R_WGMMA_FENCE, R_GLOBAL_RACE, R_TOO_MANY
};

typedef struct {
    int32_t component, epoch, issued, operation, warp, family, what;
} Access;

typedef struct {
    int32_t kind, warp, operation, what;
    int32_t pad, flags; /* a conflict: 1 completion known, 2 issue known; uninitialised: 1 by an asynchronous unit */
    int32_t tensor, cta, barrier, index; /* tensor memory; rank and offset of an mbarrier or rank of a CTA */
    Access by, against; /* between clusters: issued is the number of the cluster */
} Report;

/* An access to global memory; warps of all clusters of a launch. */
typedef struct {
    int32_t cluster, warp, component, epoch, operation, what, atomic, write;
} GlobalAccess;

typedef struct Globals Globals;

typedef void (*ReportFunction)(void);

/* Registers to look at before an operation (checks_registers.py): numbers of masks, -1 for none. */
typedef struct {
    int32_t operation, flying, loading, moved, touched, clears;
    int32_t first_unset, unset_count; /* pairs (tracked number, register) */
} RegisterCheck;

typedef struct {
    const RegisterCheck *checks;
    const int32_t *unset;
    const uint64_t *masks; /* [][words] */
    int32_t words, tracked, start, pad; /* words of a mask; registers followed; mask of those touched at the start */
} RegisterTable;

typedef struct {
    int32_t component, generic;
    uint64_t pages[PAGE_WORDS];
    int32_t *last; /* number of the last operation, by granule */
} Row;

typedef struct {
    Row *rows;
    int16_t *row_of; /* 1 + row of a component */
    int32_t count, capacity;
} Table;

typedef struct {
    int32_t component, write, mask, number;
} Part;

typedef struct {
    Part *parts;
    int32_t count, capacity;
} Fine;

typedef struct {
    Table writes, reads;
    int32_t *valid; /* bytes of each granule that were written, as bits */
    int16_t *fine_of; /* 1 + number of the granule's accesses in part; null for tensor memory */
    Fine *fine;
    int32_t fine_count, fine_capacity, granules, page_shift, tensor;
    uint64_t fine_pages[PAGE_WORDS];
} Shadow;

typedef struct {
    int32_t component, base, init_component, init_epoch, fenced, generation;
    int64_t phase;
    int32_t *coming, *done, *uses;
    int32_t *rounds[ROUNDS];
    int64_t round_of[ROUNDS];
} BarrierClocks;

typedef struct {
    int32_t epoch, mask;
} Flying;

typedef struct {
    int32_t *clock, *fenced;
    int32_t component, at, has_fenced, warp;
    int32_t own[FAMILIES], groups[FAMILIES];
    int32_t cached_operation[NUMBERS], cached_number[NUMBERS], global_number[NUMBERS];
    BarrierClocks **initialised;
    int32_t *initialised_generation;
    int32_t initialised_count, initialised_capacity;
    uint64_t *loading, *touched, *flying_mask;
    Flying *flying;
    int32_t flying_count, flying_capacity;
    uint8_t *written;
} Agent;

struct Checks {
    Report report; /* first: Python reads it */
    ReportFunction call;
    Cluster *cluster;
    Globals *globals;
    const RegisterTable *registers;
    int32_t size, limit, components, accesses_count, accesses_capacity, ordered, warps_per_cta;
    Access *accesses;
    Agent *agents;
    Shadow *shared, *tensor; /* by rank */
    BarrierClocks *barriers; /* [rank][MAX_BARS] */
    BarrierClocks *named;    /* [rank][16] */
    BarrierClocks whole;
    Access *outstanding; /* [component][rank]: the last one */
    int32_t *order;      /* places in it, in order of first use */
    uint64_t *seen;
    int32_t seen_count;
    void **blocks; /* what must be freed */
    int32_t block_count, block_capacity;
};

/* An asynchronous operation when it was issued. */
typedef struct {
    int32_t warp, operation, epoch;
    const int32_t *clock;
} Issue;

/* Granules of an access: `runs` stretches of `length` that are `stride` apart, or a list. */
typedef struct {
    int64_t start;
    int32_t length, runs, stride, count;
    const int32_t *list;
    uint64_t pages[PAGE_WORDS];
} Granules;

static inline Agent *fc_agent(const Warp *w) { return &w->cluster->checks->agents[w->number]; }

/* -- clocks */

static inline int32_t *fc_row(const Checks *k, int32_t *clock, int which) { return clock + which * k->size; }
static inline const int32_t *fc_const_row(const Checks *k, const int32_t *clock, int which) {
    return clock + which * k->size;
}
static inline int32_t fc_epoch_of(const Agent *a) { return a->clock[a->component]; }

/* checks.c */
void *fc_keep(Checks *k, size_t bytes);
void *fc_grown(void *old, int32_t count, int32_t *capacity, size_t bytes);
Report *fc_blank(Checks *k, int32_t kind, int32_t warp, int32_t operation);
void fc_tell(Checks *k);
void fc_global_race(Checks *k, int32_t warp, const GlobalAccess *other, const GlobalAccess *by);
void fc_report_register(Checks *k, int32_t kind, int32_t warp, int32_t operation, int32_t index);
void fc_step(Warp *w);
int32_t fc_own(Checks *k, Agent *a, int32_t family);
int32_t fc_close(Checks *k, Agent *a, int32_t family);
void fc_awaited(Checks *k, Agent *a, int32_t family, int32_t left);
void fc_fence(Warp *w, int32_t mode);
void fc_tcgen05_fence(Warp *w, int32_t before);
void fc_tcgen05_wait(Warp *w, int32_t family);
void fc_assume_loaded(Warp *w);
void fc_init(Warp *w, int32_t operation, Cta *cta, MBarrier *bar);
void fc_arrive(Warp *w, int32_t operation, Cta *cta, MBarrier *bar, int relaxed);
void fc_wait(Warp *w, int32_t operation, Cta *cta, MBarrier *bar);
void fc_named_arrive(Warp *w, int32_t number, int64_t generation);
void fc_named_wait(Warp *w, int32_t number, int64_t round);
void fc_cluster_arrive(Warp *w, int relaxed);
void fc_cluster_wait(Warp *w, int64_t round);
void fc_landed(const Issue *i, Cluster *c, Cta *cta, int64_t start, int64_t bytes, Cta *owner, MBarrier *bar,
               int32_t what);
void fc_completed(const Issue *i, Cluster *c, Cta *owner, MBarrier *bar, int32_t component, int32_t epoch);
void fc_bulk_read(Warp *w, int32_t operation, int32_t lane, int64_t start, int64_t bytes, int32_t what,
                  int initialised);
void fc_bulk_commit(Warp *w, uint32_t lanes);
void fc_bulk_wait(Warp *w, uint32_t lanes, int32_t left);

/* checks_shadow.c */
int32_t fc_add(Checks *k, Access a);
Granules fc_bytes(const Shadow *s, int64_t start, int64_t bytes);
int32_t fc_write_part(Checks *k, Shadow *s, Access a, int32_t start, int32_t bytes, const int32_t *clock);
Fine *fc_parts_at(Shadow *s, int64_t granule);
void fc_drop_parts(Fine *f, int32_t component, int write, int32_t mask);
void fc_add_part(Fine *f, Part p);
void fc_touch_other(Checks *k, const Agent *a, int32_t operation, int32_t rank, int32_t what);
int32_t fc_access(Checks *k, Shadow *s, const Granules *g, int write, const Issue *i, int32_t component,
                  int32_t epoch, int32_t family, int32_t what, int ordered, int initialised);
void fc_reach(Checks *k, const Access *access, int32_t rank);
void fc_reach_number(Checks *k, int32_t number, int32_t rank);
void fc_shared(Warp *w, int32_t operation, Cta *cta, const int32_t *offsets, int32_t lanes, int32_t bytes, int write);

/* checks_global.c */
void fg_begin(Globals *g);
void fg_access(Warp *w, int32_t operation, int32_t number, const uint64_t *addresses, int32_t count, int32_t bytes,
               int32_t write, int32_t atomic, int32_t what);

/* checks_tensor.c */
int fc_wgmma(Warp *w, int32_t operation, uint64_t a_bits, uint64_t b_bits, int accumulate);
void fc_wgmma_wait(Warp *w, int32_t left);
void fc_tmem(Warp *w, int32_t operation, int32_t column, int32_t count, int32_t lane, int write);
int fc_tensor_mma(Warp *w, int32_t operation, const Mma *item);
int32_t fc_commit(Warp *w, int32_t operation, uint32_t ranks);

static inline Issue fc_issue(const Warp *w, int32_t operation) {
    const Agent *a = fc_agent(w);
    return (Issue){w->number, operation, a->clock[a->component], a->clock};
}

#endif
