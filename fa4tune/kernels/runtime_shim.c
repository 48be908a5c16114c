/* The hooks that CuteDSLRuntime.h publishes and the static runtime archive does not hold.
 *
 * With them a compiled kernel is a library of its own: it needs libtvm_ffi and the CUDA runtime, nothing of the
 * compiler. Prototypes follow CuteDSLRuntime.h and the CUDA runtime API reference.
 */
#include <stdint.h>
#include <stdio.h>

const char *cudaGetErrorName(int code);
const char *cudaGetErrorString(int code);

typedef void (*set_error_t)(const char *kind, const char **parts, int32_t part_count);

void CuteDSLRT_TVMFFISetRaisedCudaError(set_error_t set_error, int32_t code) {
  const char *parts[3] = {cudaGetErrorName(code), ": ", cudaGetErrorString(code)};
  set_error("RuntimeError", parts, 3);
}

void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(set_error_t set_error, int32_t gx, int32_t gy, int32_t gz, int32_t bx,
                                              int32_t by, int32_t bz, int32_t threads, int64_t smem, int32_t device,
                                              int32_t max_threads, int32_t mbx, int32_t mby, int32_t mbz, int32_t mgx,
                                              int32_t mgy, int32_t mgz, int32_t max_smem, int32_t max_smem_optin,
                                              const char *violation, const char *file, int32_t line, int32_t column,
                                              int32_t end_column) {
  char text[320];
  (void)mbx, (void)mby, (void)mbz, (void)mgx, (void)mgy, (void)mgz, (void)max_smem, (void)file, (void)line;
  (void)column, (void)end_column;
  snprintf(text, sizeof text,
           ": grid %dx%dx%d, block %dx%dx%d (%d threads, device %d takes %d), %lld bytes of shared memory (it takes %d)",
           gx, gy, gz, bx, by, bz, threads, device, max_threads, (long long)smem, max_smem_optin);
  const char *parts[2] = {violation ? violation : "invalid launch", text};
  set_error("RuntimeError", parts, 2);
}
