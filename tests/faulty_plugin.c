/*
 * A network plugin that hands every call of the interface's v8 to another plugin and misbehaves as FAULTY_MODE says, so
 * that the tests can show that the command line notices. FAULTY_REAL names the other plugin's file.
 *
 * In mode "gpu" it takes the memory of tests/cuda_stand_in.c for GPU memory, and what it received is not there before it
 * was flushed.
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../ffi/nccl_net.h"

/* Receives in flight: what NCCL may keep per connection, for the few connections of a test. */
#define MOST 256

extern ncclNet_v8_t ncclNetPlugin_v8;

static ncclNet_v8_t *real;
static struct { void *request; char *data; int n; } receives[MOST];
static struct { char *data; int size; } unflushed[MOST];
static long tests;

static int mode(const char *name) {
  const char *set = getenv("FAULTY_MODE");
  return set && strcmp(set, name) == 0;
}

static ncclResult_t init(ncclDebugLogger_t log) { return real->init(log); }

static ncclResult_t listen_on(int dev, void *handle, void **listenComm) {
  ncclResult_t result = real->listen(dev, handle, listenComm);
  if (mode("overrun")) ((char *)handle)[NCCL_NET_HANDLE_MAXSIZE] = 0;
  return result;
}

static ncclResult_t irecv(void *comm, int n, void **data, int *sizes, int *tags, void **mhandles, void **request) {
  ncclResult_t result = real->irecv(comm, n, data, sizes, tags, mhandles, request);
  if (result != ncclSuccess || *request == NULL) return result;
  for (int i = 0; i < MOST; i++) {
    if (receives[i].request) continue;
    receives[i].request = *request;
    receives[i].data = data[0];
    receives[i].n = n;
    break;
  }
  return result;
}

static ncclResult_t test(void *request, int *done, int *sizes) {
  tests++;
  if (mode("hang") && tests > 20) { *done = 0; return ncclSuccess; }
  if (mode("crash") && tests > 20) abort();
  if (mode("sigpipe") && tests > 20) raise(SIGPIPE);
  int size[8] = {0};
  ncclResult_t result = real->test(request, done, size);
  if (result != ncclSuccess || !*done) return result;
  for (int i = 0; i < MOST; i++) {
    if (receives[i].request != request) continue;
    receives[i].request = NULL;
    for (int u = 0; mode("gpu") && size[0] > 0 && u < MOST; u++) {
      if (unflushed[u].data) continue;
      unflushed[u].data = receives[i].data;
      unflushed[u].size = size[0];
      for (int b = 0; b < size[0]; b++) receives[i].data[b] ^= 0x55;
      break;
    }
    if (mode("corrupt") && size[0] > 0) receives[i].data[size[0] - 1] ^= 0x40;
    if (mode("short") && size[0] > 8) size[0]--;
    break;
  }
  if (sizes) memcpy(sizes, size, sizeof(int));
  return ncclSuccess;
}

static ncclResult_t properties(int dev, ncclNetProperties_v8_t *props) {
  ncclResult_t result = real->getProperties(dev, props);
  if (mode("gpu")) props->ptrSupport |= NCCL_PTR_CUDA;
  return result;
}

static ncclResult_t reg_mr(void *comm, void *data, size_t size, int type, void **mhandle) {
  if (mode("gpu") && type != NCCL_PTR_CUDA) return ncclInvalidArgument;
  return real->regMr(comm, data, size, mode("gpu") ? NCCL_PTR_HOST : type, mhandle);
}

static ncclResult_t flush(void *comm, int n, void **data, int *sizes, void **mhandles, void **request) {
  for (int u = 0; u < MOST; u++) {
    if (unflushed[u].data != data[0] || unflushed[u].size != sizes[0]) continue;
    for (int b = 0; b < sizes[0]; b++) unflushed[u].data[b] ^= 0x55;
    unflushed[u].data = NULL;
    break;
  }
  return real->iflush(comm, n, data, sizes, mhandles, request);
}

__attribute__((constructor)) static void load(void) {
  void *library = dlopen(getenv("FAULTY_REAL"), RTLD_NOW | RTLD_LOCAL);
  real = library ? dlsym(library, "ncclNetPlugin_v8") : NULL;
  if (!real) _exit(99);
  ncclNetPlugin_v8 = *real;
  ncclNetPlugin_v8.name = "Faulty";
  ncclNetPlugin_v8.init = init;
  ncclNetPlugin_v8.listen = listen_on;
  ncclNetPlugin_v8.irecv = irecv;
  ncclNetPlugin_v8.getProperties = properties;
  ncclNetPlugin_v8.regMr = reg_mr;
  ncclNetPlugin_v8.iflush = flush;
  ncclNetPlugin_v8.test = test;
}

ncclNet_v8_t ncclNetPlugin_v8;
