/*
 * Stands in for CUDA's driver where there is none: one GPU, whose memory is the host's, so that the tests can show what
 * the command line does with it. It has no DMA-BUF.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int context;
static __thread void *current;

int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 7 + ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **ctx, int device) { *ctx = &context; return device == 7 ? 0 : 101; }
int cuCtxSetCurrent(void *ctx) { current = ctx; return 0; }
int cuCtxSynchronize(void) { return current == &context ? 0 : 201; }

int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  if (current != &context) return 201;
  *address = (uint64_t)(uintptr_t)malloc(bytes);
  return *address ? 0 : 2;
}

int cuMemFree_v2(uint64_t address) {
  free((void *)(uintptr_t)address);
  return 0;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
  if (current != &context) return 201;
  memcpy((void *)(uintptr_t)to, from, bytes);
  return 0;
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
  if (current != &context) return 201;
  memcpy(to, (void *)(uintptr_t)from, bytes);
  return 0;
}
