/* State that translated code, the C runtime and Python share. layout.py mirrors every struct.
 *
 * A function of the runtime performs one system operation of one warp for the lanes of a mask. Operands lie in
 * the warp's registers or beside them, where the table of locations says (operand()). What a function does not
 * handle, every fault included, it hands to warp->cluster->host, the plain emulator's own function.
 */
#ifndef FA4TUNE_RUNTIME_H
#define FA4TUNE_RUNTIME_H

#include <stdint.h>
#include <string.h>

enum { READY, BLOCKED, DONE };
enum { OK, SUSPEND, FAULT };
enum { EXIT = -9 };
enum { WAIT_NONE, WAIT_MBARRIER, WAIT_NAMED, WAIT_CLUSTER, WAIT_OTHER };
enum { SMEM_BASE = 1024, RANK_SHIFT = 24, PAGE_SHIFT = 10, TMEM_LANES = 128, LOCAL_BYTES = 1 << 16 };
enum { MAX_STACK = 128, MAX_WAITERS = 64, MAX_BARS = 256, MAX_WARPS = 512, MAX_MMA = 512, MAX_KINDS = 16 };
enum {
    GLOBAL_READ, GLOBAL_WRITE, SMEM_READ, SMEM_WRITE, DSMEM_READ, DSMEM_WRITE, TMEM_READ, TMEM_WRITE,
    TMA_READ, TMA_WRITE, MMA_SMEM, PATHS
};

#define SHARED_WINDOW (1ull << 56)
#define PARAM_WINDOW (1ull << 57)
#define LOCAL_WINDOW (1ull << 58)

typedef struct Warp Warp;
typedef struct Cta Cta;
typedef struct Cluster Cluster;
typedef struct Checks Checks;

typedef struct {
    int64_t offset;  /* of the address operand */
    int32_t first, destinations;  /* first of its locations, which name destinations and then sources */
    int32_t size, count;  /* bytes of an element, elements a lane */
    int32_t mode;  /* per operation, see operations.py */
    int32_t flag;
    int64_t offset2;
    int32_t extra[8];
} OperationInfo;

typedef struct {
    int32_t count, pending, tx, live;
    int64_t phase;
    int32_t offset, waiting;
    int16_t waiters[MAX_WAITERS];
} MBarrier;

typedef struct {
    int32_t arrived, expected, used, waiting;
    int64_t generation;
    int16_t waiters[MAX_WAITERS];
} NamedBarrier;

typedef struct {
    uint64_t address;
    int64_t nbytes;
    uint8_t *bytes;
    int64_t writable;
} Region;

typedef struct {
    int64_t stamp, progress;
    const uint8_t *parameters;
    int64_t parameter_bytes;
    const Region *regions;
    int32_t region_count;
    int32_t late;  /* asynchronous work is queued by the host */
    int32_t observed;  /* barrier operations go through the host, which traces or checks them */
    int32_t blocks;
    const OperationInfo *operations;
    void *gemm;  /* cblas_sgemm of NumPy's own BLAS, or null */
    int64_t matrix_ns;  /* CPU time spent in it */
} Machine;

typedef struct {
    int32_t operation, accumulate;
    uint64_t d, a, b;
    uint32_t idesc, off[8];
    int32_t warp;
} Mma;

typedef struct {
    int32_t kind, m, n, pad; /* kind: mode of tcgen05.mma, or 4 and 1 if A comes from registers */
    int64_t count;
} MmaCount;

typedef struct {
    int32_t pc, join;
    uint32_t mask, pad;
} Frame;

typedef int32_t (*HostFunction)(Warp *, int32_t, uint32_t);
typedef int32_t (*RunFunction)(Warp *);

struct Warp {
    uint8_t *bases[3];  /* registers, special registers, constants */
    uint8_t *local;
    uint8_t *written; /* of a checked run: whether the registers that it follows were */
    Cta *cta;
    Cluster *cluster;
    const OperationInfo *operations;
    const int32_t *operands;
    int64_t *visits;  /* [blocks][2]: times executed, lanes */
    int64_t steps, lanes;  /* instructions executed; lanes in mask */
    uint32_t mask, alive;
    int32_t pc, join, depth, fuel, state, fault;
    int32_t index, number;  /* in the CTA; in the cluster */
    int32_t threads, timed_out, wait_kind, wait_index;
    int64_t token, cluster_round;
    int32_t open_mmas, mma_count;  /* recorded since the last commit; all */
    int32_t group_count, kinds;
    int32_t groups[MAX_MMA];
    Mma mmas[MAX_MMA];
    MmaCount mma_kinds[MAX_KINDS];
    int64_t bytes[PATHS];
    Frame stack[MAX_STACK];
};

struct Cta {
    Cluster *cluster;
    uint8_t *smem;
    int64_t *stamps;
    uint32_t *tmem;  /* [column][lane], null before the first allocation */
    uint16_t *bar_index;  /* 1 + number of the mbarrier at an 8-byte granule, 0 for none */
    MBarrier *bars;
    NamedBarrier *named;
    void *operand_cache;
    int32_t smem_bytes, rank, bar_count, thread_count;
    int16_t tmem_owner[16];  /* per 32 columns: 1 + first column of its allocation, 0 free */
    int32_t tensor_count, pad;
    Mma tensor[MAX_MMA];  /* issued and not yet performed */
};

struct Cluster {
    Machine *machine;
    Checks *checks; /* of a checked run, else null */
    Cta **ctas;
    Warp **warps;
    HostFunction host;
    RunFunction run;
    int32_t size, warp_count, ready_count, stalled;
    int32_t arrived, expected, waiting, current;
    int64_t generation;
    int16_t waiters[MAX_WARPS];
    int16_t ready[MAX_WARPS];
};

/* memory.c */
uint8_t *fa_global(const Machine *m, uint64_t address, int64_t bytes, int write);
int32_t fa_region_number(const Machine *m, uint64_t address);

/* sync.c */
void fa_push_ready(Cluster *c, int32_t number);
void fa_mbarrier_check(Cta *cta, MBarrier *bar);
MBarrier *fa_find_mbarrier(Cluster *c, int64_t address);

/* tensor.c */
int fa_allocated(const Cta *cta, int64_t column, int64_t count);

static inline void *location(const Warp *w, int32_t index) {
    int32_t at = w->operands[index];
    return w->bases[at >> 28] + (at & ((1 << 28) - 1));
}

static inline const void *source(const Warp *w, const OperationInfo *o, int32_t k) {
    return location(w, o->first + o->destinations + k);
}

static inline void *destination(const Warp *w, const OperationInfo *o, int32_t k) { return location(w, o->first + k); }

static inline void put_predicate(uint32_t *to, uint32_t value, uint32_t mask) { *to = (*to & ~mask) | (value & mask); }

static inline const OperationInfo *info(const Warp *w, int32_t op) { return w->operations + op; }

static inline int32_t host(Warp *w, int32_t op, uint32_t mask) {
    int32_t rc = w->cluster->host(w, op, mask);
    if (rc == FAULT) w->fault = 1;
    return rc;
}

static inline uint32_t low_lane(uint32_t mask) { return (uint32_t)__builtin_ctz(mask); }

static inline void touch(Cta *cta, int64_t start, int64_t nbytes) {
    int64_t stamp = ++cta->cluster->machine->stamp;
    for (int64_t p = start >> PAGE_SHIFT; p <= (start + nbytes - 1) >> PAGE_SHIFT; p++) cta->stamps[p] = stamp;
}

#endif
