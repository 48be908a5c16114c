/* A CUDA runtime that launches nothing: it hands every launch to a callback.
 *
 * A compiled CuTe DSL object, linked with the static runtime archive of its wheel, calls these functions of the
 * public CUDA runtime API. Prototypes and layouts follow the CUDA runtime and driver API reference (CUDA 12 and
 * 13) and CuteDSLRuntime.h; they are repeated here so that no CUDA header is needed to build the emulator.
 *
 * Linked with -Bsymbolic: a real CUDA runtime in the same process must not take these calls.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_FOUND = 500, NOT_SUPPORTED = 801 };

typedef struct { unsigned x, y, z; } dim3_t;

typedef struct {
  int id;
  char pad[4];
  union {
    char bytes[64];
    struct { unsigned x, y, z; } cluster;
  } value;
} launch_attribute_t;

typedef struct {
  dim3_t grid, block;
  size_t dynamic_smem_bytes;
  void *stream;
  launch_attribute_t *attributes;
  unsigned attribute_count;
} launch_config_t;

enum { CLUSTER_DIMENSION = 4 };

/* grid, block and cluster are x, y, z; args is the launch's array of pointers to parameters. */
typedef void (*launch_callback_t)(const char *entry, const unsigned *grid, const unsigned *block,
                                  const unsigned *cluster, uint64_t smem_bytes, void **args);

static launch_callback_t launch_callback;
static char problem[512];

enum { ATTRIBUTES = 256 };
static int attribute_value[ATTRIBUTES];
static unsigned char attribute_known[ATTRIBUTES];

static int refuse(const char *what, int code) {
  if (!problem[0]) snprintf(problem, sizeof problem, "%s", what);
  return code;
}

/* --- what the emulator calls --- */

void fa4tune_capture_begin(launch_callback_t callback) {
  launch_callback = callback;
  problem[0] = 0;
}

void fa4tune_capture_attribute(int attribute, int value) {
  if (attribute < 0 || attribute >= ATTRIBUTES) return;
  attribute_value[attribute] = value;
  attribute_known[attribute] = 1;
}

/* The first call that could not be served since capture_begin, or an empty string. */
const char *fa4tune_capture_problem(void) { return problem; }

/* --- the CUDA runtime API --- */

/* A library handle is the module's code; a kernel handle is the name of its entry. */
int cudaLibraryLoadData(void **library, const void *code, void *jit_options, void **jit_values, unsigned jit_count,
                        void *options, void **values, unsigned count) {
  (void)jit_options, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
  *library = (void *)code;
  return SUCCESS;
}

int cudaLibraryUnload(void *library) { return (void)library, SUCCESS; }

int cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  (void)library;
  size_t bytes = strlen(name) + 1;
  char *copy = malloc(bytes); /* lives as long as the library: the object keeps the handle */
  if (!copy) return NOT_FOUND;
  memcpy(copy, name, bytes);
  *kernel = copy;
  return SUCCESS;
}

int cudaLaunchKernelExC(const launch_config_t *config, const void *kernel, void **args) {
  unsigned grid[3] = {config->grid.x, config->grid.y, config->grid.z};
  unsigned block[3] = {config->block.x, config->block.y, config->block.z};
  unsigned cluster[3] = {1, 1, 1};
  if (!launch_callback) return refuse("a launch outside a capture", INVALID_VALUE);
  for (unsigned i = 0; i < config->attribute_count; i++)
    if (config->attributes[i].id == CLUSTER_DIMENSION) {
      cluster[0] = config->attributes[i].value.cluster.x;
      cluster[1] = config->attributes[i].value.cluster.y;
      cluster[2] = config->attributes[i].value.cluster.z;
    }
  launch_callback(kernel, grid, block, cluster, config->dynamic_smem_bytes, args);
  return SUCCESS;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  char what[64];
  (void)device;
  if (attribute < 0 || attribute >= ATTRIBUTES || !attribute_known[attribute]) {
    snprintf(what, sizeof what, "cudaDeviceGetAttribute of attribute %d", attribute);
    return refuse(what, INVALID_VALUE);
  }
  *value = attribute_value[attribute];
  return SUCCESS;
}

static int kernel_attribute(int *value, int attribute, void *kernel, int device) {
  (void)kernel, (void)device;
  enum { MAX_THREADS_PER_BLOCK = 0 };
  /* Static shared memory, constants, local memory: none, as CuTe DSL allocates dynamically only. */
  *value = attribute == MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return SUCCESS;
}

static int device_get(int *device, int ordinal) { return *device = ordinal, SUCCESS; }

int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                     int *status) {
  (void)version, (void)flags;
  *function = NULL;
  if (strcmp(symbol, "cuKernelGetAttribute") == 0) *function = (void *)kernel_attribute;
  if (strcmp(symbol, "cuDeviceGet") == 0) *function = (void *)device_get;
  if (status) *status = *function ? 0 : 1; /* success or symbol not found */
  return *function ? SUCCESS : refuse(symbol, NOT_FOUND);
}

int cudaFuncSetAttribute(const void *f, int attribute, int value) {
  return (void)f, (void)attribute, (void)value, SUCCESS;
}
int cudaKernelSetAttributeForDevice(void *k, int attribute, int value, int device) {
  return (void)k, (void)attribute, (void)value, (void)device, SUCCESS;
}
int cudaGetDevice(int *device) { return *device = 0, SUCCESS; }
int cudaSetDevice(int device) { return (void)device, SUCCESS; }
int cudaGetDeviceCount(int *count) { return *count = 1, SUCCESS; }
int cudaGetLastError(void) { return SUCCESS; }
int cudaDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cudaDeviceSynchronize(void) { return SUCCESS; }
int cudaStreamSynchronize(void *stream) { return (void)stream, SUCCESS; }

const char *cudaGetErrorName(int code) {
  (void)code;
  return problem[0] ? problem : "an error outside the capture";
}
const char *cudaGetErrorString(int code) { return cudaGetErrorName(code); }

/* The archive refers to the rest of the runtime too. A host function that calls one of these is refused by
 * name; the empty parameter list fits every prototype of the C calling convention. */
#define REFUSED(name) int name() { return refuse(#name, NOT_SUPPORTED); }
REFUSED(cudaEventCreate) REFUSED(cudaEventCreateWithFlags) REFUSED(cudaEventDestroy) REFUSED(cudaEventElapsedTime)
REFUSED(cudaEventQuery) REFUSED(cudaEventRecord) REFUSED(cudaEventRecordWithFlags) REFUSED(cudaEventSynchronize)
REFUSED(cudaFree) REFUSED(cudaFreeAsync) REFUSED(cudaFreeHost) REFUSED(cudaMalloc) REFUSED(cudaMallocAsync)
REFUSED(cudaMallocHost) REFUSED(cudaMallocManaged) REFUSED(cudaMemcpy) REFUSED(cudaMemcpy3D)
REFUSED(cudaMemcpy3DAsync) REFUSED(cudaMemcpyAsync) REFUSED(cudaMemset) REFUSED(cudaMemsetAsync)
REFUSED(cudaGraphAddKernelNode) REFUSED(cudaGraphCreate) REFUSED(cudaGraphDestroy) REFUSED(cudaGraphExecDestroy)
REFUSED(cudaGraphInstantiate) REFUSED(cudaGraphKernelNodeGetAttribute) REFUSED(cudaGraphKernelNodeSetAttribute)
REFUSED(cudaGraphLaunch) REFUSED(cudaGetDeviceProperties) REFUSED(cudaLibraryGetGlobal)
REFUSED(cudaLibraryGetKernelCount) REFUSED(cudaLibraryGetManaged) REFUSED(cudaLibraryGetUnifiedFunction)
REFUSED(cudaLibraryLoadFromFile) REFUSED(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSED(cudaProfilerStart) REFUSED(cudaProfilerStop) REFUSED(cudaStreamAddCallback)
REFUSED(cudaStreamBeginCapture) REFUSED(cudaStreamCreate) REFUSED(cudaStreamDestroy) REFUSED(cudaStreamEndCapture)
REFUSED(cudaStreamWaitEvent)

/* --- hooks that CuteDSLRuntime.h publishes --- */

typedef void (*set_error_t)(const char *kind, const char **parts, int32_t part_count);

void CuteDSLRT_TVMFFISetRaisedCudaError(set_error_t set_error, int32_t code) {
  char number[32];
  snprintf(number, sizeof number, " (CUDA error %d)", code);
  const char *parts[2] = {cudaGetErrorName(code), number};
  set_error("RuntimeError", parts, 2);
}

void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(set_error_t set_error, int32_t gx, int32_t gy, int32_t gz, int32_t bx,
                                              int32_t by, int32_t bz, int32_t threads, int64_t smem, int32_t device,
                                              int32_t max_threads, int32_t mbx, int32_t mby, int32_t mbz, int32_t mgx,
                                              int32_t mgy, int32_t mgz, int32_t max_smem, int32_t max_smem_optin,
                                              const char *violation, const char *file, int32_t line, int32_t column,
                                              int32_t end_column) {
  char text[256];
  (void)device, (void)max_threads, (void)mbx, (void)mby, (void)mbz, (void)mgx, (void)mgy, (void)mgz, (void)max_smem;
  (void)max_smem_optin, (void)file, (void)line, (void)column, (void)end_column;
  snprintf(text, sizeof text, " (grid %dx%dx%d, block %dx%dx%d, %d threads, %lld bytes of shared memory)", gx, gy, gz, bx,
           by, bz, threads, (long long)smem);
  const char *parts[2] = {violation ? violation : "invalid launch", text};
  set_error("RuntimeError", parts, 2);
}
