/*
 * Counts what a thread asks of the C library (LD_PRELOAD): memory, locks, and what the kernel does for locks. Nothing is
 * changed, and threads that did not ask are not counted.
 *
 * What it cannot see is a lock of Rust's standard library that nobody else has: that is an exchange of a number, and
 * calls nothing. When somebody has it, it waits by futex, through syscall().
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>

struct counts {
  long allocations, frees, locks, futex_waits, futex_wakes;
};

static __thread int counting __attribute__((tls_model("initial-exec")));
static __thread struct counts counts __attribute__((tls_model("initial-exec")));

/* The calling thread is counted from here on, or not any more. */
void call_counter_count(int on) { counting = on; }

/* What was counted of the calling thread. */
void call_counter_counts(struct counts *to) { *to = counts; }

#define COUNT(what) ((void)(counting && ++counts.what))

/* The C library's own names: looking functions up by name would allocate in the middle of an allocation. */
extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

void *malloc(size_t size) {
  COUNT(allocations);
  return __libc_malloc(size);
}

void *calloc(size_t number, size_t size) {
  COUNT(allocations);
  return __libc_calloc(number, size);
}

void *realloc(void *old, size_t size) {
  COUNT(allocations);
  return __libc_realloc(old, size);
}

void *memalign(size_t alignment, size_t size) {
  COUNT(allocations);
  return __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size) {
  COUNT(allocations);
  return __libc_memalign(alignment, size);
}

int posix_memalign(void **to, size_t alignment, size_t size) {
  COUNT(allocations);
  void *made = __libc_memalign(alignment, size);
  if (!made) return ENOMEM;
  *to = made;
  return 0;
}

void free(void *old) {
  COUNT(frees);
  __libc_free(old);
}

/* The next definition of a function, looked up before there are threads. */
static long (*next_syscall)(long, ...);
static int (*next_lock)(pthread_mutex_t *);
static int (*next_read)(pthread_rwlock_t *);
static int (*next_write)(pthread_rwlock_t *);
static int (*next_spin)(pthread_spinlock_t *);

__attribute__((constructor)) static void begin(void) {
  next_syscall = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  next_lock = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_lock");
  next_read = (int (*)(pthread_rwlock_t *))dlsym(RTLD_NEXT, "pthread_rwlock_rdlock");
  next_write = (int (*)(pthread_rwlock_t *))dlsym(RTLD_NEXT, "pthread_rwlock_wrlock");
  next_spin = (int (*)(pthread_spinlock_t *))dlsym(RTLD_NEXT, "pthread_spin_lock");
}

int pthread_mutex_lock(pthread_mutex_t *lock) {
  COUNT(locks);
  if (!next_lock) begin();
  return next_lock(lock);
}

int pthread_rwlock_rdlock(pthread_rwlock_t *lock) {
  COUNT(locks);
  if (!next_read) begin();
  return next_read(lock);
}

int pthread_rwlock_wrlock(pthread_rwlock_t *lock) {
  COUNT(locks);
  if (!next_write) begin();
  return next_write(lock);
}

int pthread_spin_lock(pthread_spinlock_t *lock) {
  COUNT(locks);
  if (!next_spin) begin();
  return next_spin(lock);
}

long syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long a[6];
  for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
  va_end(list);
  if (number == SYS_futex) {
    int operation = (int)a[1] & FUTEX_CMD_MASK;
    if (operation == FUTEX_WAKE || operation == FUTEX_WAKE_BITSET) COUNT(futex_wakes);
    else COUNT(futex_waits);
  }
  if (!next_syscall) begin();
  return next_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
