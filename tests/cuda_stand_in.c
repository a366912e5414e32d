/*
 * Stands in for CUDA's driver where there is none: one GPU, so that the tests can show what Towline does with its memory.
 * It has no DMA-BUF.
 *
 * What cuMemAlloc gives is the host's memory, for the command line, whose stand-in for RDMA moves it as such. What
 * stand_in_alloc gives faults when the host touches it: copies reach it, and the tests through its alias. Streams do what
 * they are given late: an event happens when it has been asked after as often as stand_in_late says, and what is before it
 * in its stream happens then, and not earlier.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, NOT_READY = 600, ILLEGAL_ADDRESS = 700, DESTROYED = 709 };

/* Each reset ends the context and makes another one. */
static char contexts[16];
static int resets;
#define context contexts[__atomic_load_n(&resets, __ATOMIC_SEQ_CST)]
static __thread void *current;
static __thread int depth;

int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *count) { *count = 1; return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = 7 + ordinal; return OK; }
int cuDevicePrimaryCtxRetain(void **ctx, int device) { *ctx = &context; return device == 7 ? OK : INVALID_DEVICE; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device == 7 ? OK : INVALID_DEVICE; }
int cuCtxSetCurrent(void *ctx) { current = ctx; return OK; }
int cuCtxGetDevice(int *device) { *device = 7; return current == &context ? OK : INVALID_CONTEXT; }
int cuDeviceGetPCIBusId(char *text, int length, int device) {
  if (device != 7 || length < 13) return INVALID_DEVICE;
  strcpy(text, "0000:3B:00.0");
  return OK;
}
int cuCtxSynchronize(void) { return current == &context ? OK : INVALID_CONTEXT; }

int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  if (current != &context) return INVALID_CONTEXT;
  *address = (uint64_t)(uintptr_t)malloc(bytes);
  return *address ? OK : OUT_OF_MEMORY;
}

int cuMemFree_v2(uint64_t address) {
  free((void *)(uintptr_t)address);
  return OK;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
  if (current != &context) return INVALID_CONTEXT;
  memcpy((void *)(uintptr_t)to, from, bytes);
  return OK;
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
  if (current != &context) return INVALID_CONTEXT;
  memcpy(to, (void *)(uintptr_t)from, bytes);
  return OK;
}

/* Memory that only copies reach. */

struct memory { uintptr_t address, alias; size_t bytes; };
static struct memory memories[256];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uintptr_t alias(uintptr_t address, size_t bytes) {
  for (int i = 0; i < 256; i++) {
    struct memory *m = &memories[i];
    if (m->bytes && address >= m->address && address - m->address < m->bytes)
      return address - m->address + bytes <= m->bytes ? m->alias + (address - m->address) : 0;
  }
  return address;
}

/* The alias, at which the tests see the memory, goes to `seen`. */
uint64_t stand_in_alloc(size_t bytes, void **seen) {
  int fd = memfd_create("gpu", 0), place = 0;
  if (fd < 0 || ftruncate(fd, (off_t)bytes)) abort();
  void *address = mmap(0, bytes, PROT_NONE, MAP_SHARED, fd, 0);
  *seen = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  pthread_mutex_lock(&lock);
  while (place < 256 && memories[place].bytes) place++;
  if (place == 256 || address == MAP_FAILED || *seen == MAP_FAILED) abort();
  memories[place] = (struct memory){(uintptr_t)address, (uintptr_t)*seen, bytes};
  pthread_mutex_unlock(&lock);
  return (uint64_t)(uintptr_t)address;
}

/* A copy that comes after this is an error: to free is to promise that none does. */
void stand_in_free(uint64_t address) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < 256; i++)
    if (memories[i].address == address) {
      munmap((void *)memories[i].address, memories[i].bytes);
      munmap((void *)memories[i].alias, memories[i].bytes);
      memories[i].bytes = 0;
    }
  pthread_mutex_unlock(&lock);
}

int cuPointerGetAttribute(void *data, int attribute, uint64_t address) {
  pthread_mutex_lock(&lock);
  int known = 0;
  for (int i = 0; i < 256; i++) known |= memories[i].bytes && address - memories[i].address < memories[i].bytes;
  pthread_mutex_unlock(&lock);
  if (!known) return INVALID_VALUE;
  /* As with memory that is mapped into a range: it belongs to no context. */
  if (attribute == 1) *(void **)data = NULL;
  else if (attribute == 9) *(int *)data = 0;
  else return INVALID_VALUE;
  return OK;
}

/* Contexts of a thread. */

int cuCtxPushCurrent_v2(void *ctx) {
  if (ctx != &context) return DESTROYED;
  depth++;
  return OK;
}

int cuCtxPopCurrent_v2(void **ctx) {
  *ctx = &context;
  return depth-- > 0 ? OK : INVALID_CONTEXT;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
  static __thread int own;
  int before = own;
  own = *mode;
  *mode = before;
  return OK;
}

/* Page-locked memory. */

int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) {
  (void)flags;
  if (!depth) return INVALID_CONTEXT;
  return posix_memalign(memory, 4096, bytes) ? OUT_OF_MEMORY : OK;
}

int cuMemFreeHost(void *memory) {
  free(memory);
  return OK;
}

/* Streams and events. */

struct event { int late; struct op *op; };
struct op { struct op *next; enum { COPY, WRITE, EVENT } kind; uint64_t to, from; size_t bytes; struct event *event; };
struct stream { struct op *first, **last; int priority; };

enum { GREATEST = -5 };

static int late, until_failure, failed, copies_waiting, held;

void stand_in_late(int queries) { late = queries; }
/* So many copies from now on go well. 0: all. */
void stand_in_fail(int copies) { until_failure = copies; failed = 0; }
/* A stream of the application's, of priority 0, waits. All of that priority share a queue, so none of them moves. */
void stand_in_hold(int whether) { __atomic_store_n(&held, whether, __ATOMIC_SEQ_CST); }
void stand_in_reset(void) { __atomic_add_fetch(&resets, 1, __ATOMIC_SEQ_CST); }
int stand_in_waiting(void) { return __atomic_load_n(&copies_waiting, __ATOMIC_SEQ_CST); }

int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  if (!depth) return INVALID_CONTEXT;
  *least = 0;
  *greatest = GREATEST;
  return OK;
}

int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  if (!depth || flags != 1) return INVALID_CONTEXT;
  struct stream *made = calloc(1, sizeof *made);
  made->last = &made->first;
  made->priority = priority;
  *stream = made;
  return OK;
}

int cuStreamCreate(void **stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

/* Ending a stream that has something to do is a defect of its owner here. */
int cuStreamDestroy_v2(void *stream) {
  if (((struct stream *)stream)->first) abort();
  free(stream);
  return OK;
}

int cuEventCreate(void **event, unsigned flags) {
  (void)flags;
  if (!depth) return INVALID_CONTEXT;
  *event = calloc(1, sizeof(struct event));
  return OK;
}

int cuEventDestroy_v2(void *event) {
  free(event);
  return OK;
}

static int append(struct stream *stream, struct op op) {
  if (!depth) return INVALID_CONTEXT;
  if (failed) return ILLEGAL_ADDRESS;
  struct op *made = malloc(sizeof op);
  *made = op;
  made->next = NULL;
  pthread_mutex_lock(&lock);
  if (op.kind == EVENT) {
    /* Recorded anew: it no longer stands where it stood. */
    if (op.event->op) op.event->op->event = NULL;
    op.event->op = made;
    op.event->late = late;
  } else {
    copies_waiting++;
  }
  *stream->last = made;
  stream->last = &made->next;
  pthread_mutex_unlock(&lock);
  return OK;
}

int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void *stream) {
  return append(stream, (struct op){.kind = COPY, .to = to, .from = from, .bytes = bytes});
}

int cuStreamWriteValue64_v2(void *stream, uint64_t to, uint64_t value, unsigned flags) {
  if (flags || to % 8) return INVALID_VALUE;
  return append(stream, (struct op){.kind = WRITE, .to = to, .from = value});
}

int cuEventRecord(void *event, void *stream) {
  return append(stream, (struct op){.kind = EVENT, .event = event, .from = (uint64_t)(uintptr_t)stream});
}

static int perform(struct op *op) {
  if (op->kind == EVENT) return OK;
  copies_waiting--;
  if (failed) return ILLEGAL_ADDRESS;
  if (op->kind == WRITE) {
    uintptr_t to = alias(op->to, 8);
    if (!to) return ILLEGAL_ADDRESS;
    __atomic_store_n((uint64_t *)to, op->from, __ATOMIC_RELEASE);
    return OK;
  }
  if (until_failure && --until_failure == 0) return failed = 1, ILLEGAL_ADDRESS;
  uintptr_t to = alias(op->to, op->bytes), from = alias(op->from, op->bytes);
  if (!to || !from) return ILLEGAL_ADDRESS;
  /* Such a copy may need the GPU's processors, which a kernel that waits for it may hold. */
  if (to != op->to && from != op->from) return failed = 1, ILLEGAL_ADDRESS;
  memmove((void *)to, (void *)from, op->bytes);
  return OK;
}

/* Does what is in a stream up to this place, or all. */
static int proceed(struct stream *stream, struct op *end) {
  int code = OK;
  for (struct op *op = stream->first; op; op = stream->first) {
    int is_end = op == end;
    stream->first = op->next;
    if (!op->next) stream->last = &stream->first;
    if (perform(op)) code = ILLEGAL_ADDRESS;
    if (op->kind == EVENT && op->event) op->event->op = NULL;
    free(op);
    if (is_end) break;
  }
  return code;
}

static int is_held(struct stream *stream) { return stream->priority == 0 && __atomic_load_n(&held, __ATOMIC_SEQ_CST); }

int cuEventQuery(void *event_) {
  struct event *event = event_;
  if (!depth) return INVALID_CONTEXT;
  pthread_mutex_lock(&lock);
  int code = failed ? ILLEGAL_ADDRESS : OK;
  struct stream *stream = event->op ? (struct stream *)(uintptr_t)event->op->from : NULL;
  if (stream && (is_held(stream) || event->late-- > 0) && !failed)
    code = NOT_READY;
  else if (stream && proceed(stream, event->op))
    code = ILLEGAL_ADDRESS;
  pthread_mutex_unlock(&lock);
  return code;
}

int cuStreamQuery(void *stream_) {
  struct stream *stream = stream_;
  if (!depth) return INVALID_CONTEXT;
  pthread_mutex_lock(&lock);
  int code = is_held(stream) && !failed ? NOT_READY : proceed(stream, NULL) || failed ? ILLEGAL_ADDRESS : OK;
  pthread_mutex_unlock(&lock);
  return code;
}
