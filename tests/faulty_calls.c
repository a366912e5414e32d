/*
 * Stands between one library and the kernel (LD_PRELOAD) and has its system calls fail as the kernel may: out of
 * descriptors, out of memory, interrupted, full socket buffers, fewer bytes than asked for. Or they succeed, and the thread
 * loses the processor just then, so that the peer and other threads act on it first. Only calls that come from the code of
 * that library are touched, told by their return address, so the program around it goes on as ever.
 *
 *   FAULTY_CALLS_LIBRARY  part of the library's file name
 *   FAULTY_CALLS_SEED     which faults: they follow from it and from the number of each call
 *   FAULTY_CALLS_ONLY     of the errors, only this one, as in EINTR
 *   FAULTY_CALLS_RATE     one in so many calls that move data fails; rare calls fail more often
 *   FAULTY_CALLS_PAUSES   after one in so many that have moved data the thread stands still for a moment (the same, unless set)
 *
 * A program arms it with faulty_calls_arm(1), silences it with faulty_calls_arm(0), and asks for the counts. It knows the
 * sockets that were made since it was first armed or silenced.
 *
 * It tells no lies that the kernel would not: epoll reports an edge after a call that pretended that the socket was full
 * or empty, as it does when the socket no longer is. It reports none after ENOMEM and ENOBUFS, nor does the kernel.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "injection.h"

/* Descriptors that it keeps notes about. */
#define DESCRIPTORS 65536
/* Vectors of one sendmsg or recvmsg: the library uses three. */
#define VECTORS 8
/* How long a thread stands still after a call, in microseconds: several times what the peer's answer takes. */
#define LONGEST_PAUSE 500

enum call {
  SOCKET, BIND, LISTEN, CONNECT, ACCEPT, SEND, SENDMSG, RECV, RECVMSG, NEWS, EPOLL_CREATE, EPOLL_ADD, EPOLL_WAIT, EVENTFD,
  SETSOCKOPT, GETSOCKOPT, GETSOCKNAME, GETPEERNAME, FCNTL, IOCTL, WRITE, CLOSE, OPEN, THREAD, INTERFACES, PAUSE,
  CALLS
};

static struct {
  struct target target;
  /* How much more often than the rate says: such calls are rare. */
  unsigned factor;
} table[CALLS] = {
  [SOCKET] = {{"socket", {EMFILE, ENFILE, ENOBUFS, ENOMEM}}, 10},
  [BIND] = {{"bind", {ENOMEM}}, 10},
  [LISTEN] = {{"listen", {ENOBUFS}}, 10},
  [CONNECT] = {{"connect", {EINTR, ENOBUFS, ENOMEM}}, 10},
  [ACCEPT] = {{"accept4", {EMFILE, ENFILE, ENOBUFS, ENOMEM, EINTR, ECONNABORTED}}, 10},
  [SEND] = {{"send", {EAGAIN, EINTR, ENOBUFS, ENOMEM, SHORT}}, 1},
  [SENDMSG] = {{"sendmsg", {EAGAIN, EINTR, ENOBUFS, ENOMEM, SHORT}}, 1},
  [RECV] = {{"recv", {EAGAIN, EINTR, ENOBUFS, ENOMEM, SHORT}}, 1},
  [RECVMSG] = {{"recvmsg", {EAGAIN, EINTR, ENOBUFS, ENOMEM, SHORT}}, 1},
  /* A recv from a netlink socket. */
  [NEWS] = {{"news", {ENOBUFS, EINTR}}, 20},
  [EPOLL_CREATE] = {{"epoll_create1", {EMFILE, ENFILE, ENOMEM}}, 20},
  [EPOLL_ADD] = {{"epoll_ctl", {ENOMEM, ENOSPC}}, 5},
  [EPOLL_WAIT] = {{"epoll_wait", {EINTR, SHORT}}, 1},
  [EVENTFD] = {{"eventfd", {EMFILE, ENFILE, ENOMEM}}, 20},
  [SETSOCKOPT] = {{"setsockopt", {ENOBUFS, ENOMEM}}, 5},
  [GETSOCKOPT] = {{"getsockopt", {ENOBUFS, ENOMEM}}, 5},
  [GETSOCKNAME] = {{"getsockname", {ENOBUFS}}, 5},
  [GETPEERNAME] = {{"getpeername", {ENOBUFS}}, 5},
  [FCNTL] = {{"fcntl", {ENOMEM}}, 3},
  [IOCTL] = {{"ioctl", {ENOMEM}}, 3},
  [WRITE] = {{"write", {EINTR}}, 1},
  [CLOSE] = {{"close", {EINTR}}, 5},
  [OPEN] = {{"open", {EMFILE, ENFILE, EINTR}}, 5},
  [THREAD] = {{"pthread_create", {EAGAIN}}, 20},
  [INTERFACES] = {{"getifaddrs", {EMFILE, ENOBUFS}}, 10},
  /* Not a call, but what may come after those that move data. */
  [PAUSE] = {{"moved", {LATE}}, 1},
};

static atomic_int armed;
static uintptr_t code_begin, code_end;
static unsigned rate = 100, pauses;

/* Where a descriptor is watched, to ask for another edge. It may be watched twice while it changes hands. */
static struct note {
  struct watch { int epoll; struct epoll_event event; char is_on; } watches[2];
  char is_stream, is_news;
} notes[DESCRIPTORS];
static pthread_mutex_t notes_lock = PTHREAD_MUTEX_INITIALIZER;

static int find_code(struct dl_phdr_info *info, size_t size, void *wanted) {
  (void)size;
  if (!strstr(info->dlpi_name, wanted)) return 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) *header = &info->dlpi_phdr[i];
    if (header->p_type != PT_LOAD || !(header->p_flags & PF_X)) continue;
    code_begin = info->dlpi_addr + header->p_vaddr;
    code_end = code_begin + header->p_memsz;
  }
  return 1;
}

/* Leaves a call no other fault than the one of that name. */
static void leave_only(const char *name, int kinds[KINDS]) {
  int left = 0;
  for (int kind = 0; kind < KINDS && kinds[kind]; kind++)
    if (!strcmp(name_of(kinds[kind]), name)) left = kinds[kind];
  memset(kinds, 0, KINDS * sizeof *kinds);
  kinds[0] = left;
}

/* Whether the library was found. */
int faulty_calls_arm(int on) {
  const char *set = getenv("FAULTY_CALLS_SEED");
  if (set) seed = strtoull(set, NULL, 0);
  set = getenv("FAULTY_CALLS_RATE");
  if (set) rate = (unsigned)strtoul(set, NULL, 0);
  set = getenv("FAULTY_CALLS_PAUSES");
  pauses = set ? (unsigned)strtoul(set, NULL, 0) : rate;
  set = getenv("FAULTY_CALLS_LIBRARY");
  if (set) dl_iterate_phdr(find_code, (void *)set);
  set = getenv("FAULTY_CALLS_ONLY");
  for (int call = 0; set && call < CALLS; call++) leave_only(set, table[call].target.kinds);
  atomic_store(&armed, on);
  return code_end > code_begin;
}

/* A line for each call and kind. Returns the length of the text. */
int faulty_calls_report(char *text, int room) {
  int at = 0;
  for (int call = 0; call < CALLS; call++) at = report(&table[call].target, text, at, room);
  return at;
}

static int is_from_library(const void *caller) {
  uintptr_t at = (uintptr_t)caller;
  return at >= code_begin && at < code_end;
}

static int is_ours(const void *caller) {
  return atomic_load_explicit(&armed, memory_order_relaxed) && is_from_library(caller);
}

/* Which fault this call meets: an errno, SHORT, or 0 for none. */
static int fault(enum call call, const void *caller, uint64_t *random) {
  if (!is_ours(caller) || !table[call].target.kinds[0]) return 0;
  unsigned number = atomic_fetch_add(&table[call].target.calls, 1);
  *random = chance(call, number);
  unsigned one_in = call == PAUSE ? pauses : rate / table[call].factor;
  if (*random % (one_in < 2 ? 2 : one_in)) return 0;
  *random = mix(*random);
  return next_fault(&table[call].target);
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define CALLER __builtin_return_address(0)

/* For calls that fail before they have done anything. */
#define FAIL(call) \
  do { \
    uint64_t random; \
    int error = fault(call, CALLER, &random); \
    if (error) { \
      errno = error; \
      return -1; \
    } \
  } while (0)

static struct note *note_of(int fd) { return fd >= 0 && fd < DESCRIPTORS ? &notes[fd] : NULL; }

static int real_epoll_ctl(int epoll, int what, int fd, struct epoll_event *event) {
  static __typeof__(&epoll_ctl) real;
  if (!real) real = (__typeof__(&epoll_ctl))dlsym(RTLD_NEXT, "epoll_ctl");
  return real(epoll, what, fd, event);
}

/* The socket is no longer full, or empty: epoll tells. */
static void another_edge(int fd) {
  struct note *note = note_of(fd);
  if (!note) return;
  pthread_mutex_lock(&notes_lock);
  for (struct watch *watch = note->watches; watch < note->watches + 2; watch++) {
    struct epoll_event event = watch->event;
    if (watch->is_on) real_epoll_ctl(watch->epoll, EPOLL_CTL_MOD, fd, &event);
  }
  pthread_mutex_unlock(&notes_lock);
}

/* A new socket. Every third has the smallest send buffer, so that it is really full now and then. */
static void made(int fd, const void *caller, enum call call) {
  struct note *note = note_of(fd);
  if (!note || !is_from_library(caller)) return;
  note->is_stream = 1;
  if (chance(call, (unsigned)fd + atomic_load(&table[call].target.calls)) % 3) return;
  static __typeof__(&setsockopt) real;
  if (!real) real = (__typeof__(&setsockopt))dlsym(RTLD_NEXT, "setsockopt");
  int bytes = 8192;
  real(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

int socket(int domain, int type, int protocol) {
  REAL(socket);
  FAIL(SOCKET);
  int fd = real(domain, type, protocol);
  if (domain == AF_INET || domain == AF_INET6) made(fd, CALLER, SOCKET);
  struct note *note = note_of(fd);
  if (domain == AF_NETLINK && note) note->is_news = 1;
  return fd;
}

int accept4(int listener, struct sockaddr *address, socklen_t *length, int flags) {
  REAL(accept4);
  FAIL(ACCEPT);
  int fd = real(listener, address, length, flags);
  made(fd, CALLER, ACCEPT);
  return fd;
}

/* The same, for libraries that call the older one. */
int accept(int listener, struct sockaddr *address, socklen_t *length) {
  REAL(accept);
  FAIL(ACCEPT);
  int fd = real(listener, address, length);
  made(fd, CALLER, ACCEPT);
  return fd;
}

int bind(int fd, const struct sockaddr *address, socklen_t length) {
  REAL(bind);
  FAIL(BIND);
  return real(fd, address, length);
}

int listen(int fd, int backlog) {
  REAL(listen);
  FAIL(LISTEN);
  return real(fd, backlog);
}

int connect(int fd, const struct sockaddr *address, socklen_t length) {
  REAL(connect);
  uint64_t random;
  int error = fault(CONNECT, CALLER, &random);
  if (error && error != EINTR) {
    errno = error;
    return -1;
  }
  int status = real(fd, address, length);
  /* An interrupted connect goes on (connect(2)). */
  if (error == EINTR && (status == 0 || errno == EINPROGRESS)) {
    errno = EINTR;
    return -1;
  }
  return status;
}

/* Fewer bytes, but at least one. */
static size_t fewer(size_t bytes, uint64_t random) { return bytes > 1 ? 1 + random % (bytes - 1) : bytes; }

static int is_stream(int fd) {
  struct note *note = note_of(fd);
  return note && note->is_stream;
}

/* A copy of a message that moves fewer bytes. Returns whether there is one. */
static int shorten(const struct msghdr *message, struct msghdr *less, struct iovec *vectors, uint64_t random) {
  size_t all = 0;
  if (message->msg_iovlen > VECTORS) return 0;
  for (size_t i = 0; i < message->msg_iovlen; i++) all += message->msg_iov[i].iov_len;
  size_t left = fewer(all, random);
  for (size_t i = 0; i < message->msg_iovlen; i++) {
    vectors[i] = message->msg_iov[i];
    if (vectors[i].iov_len > left) vectors[i].iov_len = left;
    left -= vectors[i].iov_len;
  }
  *less = *message;
  less->msg_iov = vectors;
  return 1;
}

/* What a call returned, perhaps a moment later. */
static ssize_t moved(ssize_t bytes, int fd, const void *caller) {
  int kept = errno;
  uint64_t random;
  if (bytes > 0 && is_stream(fd) && fault(PAUSE, caller, &random)) usleep(1 + random % LONGEST_PAUSE);
  errno = kept;
  return bytes;
}

ssize_t send(int fd, const void *data, size_t length, int flags) {
  REAL(send);
  uint64_t random;
  int error = is_stream(fd) ? fault(SEND, CALLER, &random) : 0;
  if (error == SHORT) return moved(real(fd, data, fewer(length, random), flags), fd, CALLER);
  if (!error) return moved(real(fd, data, length, flags), fd, CALLER);
  if (error == EAGAIN) another_edge(fd);
  errno = error;
  return -1;
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
  REAL(sendmsg);
  uint64_t random;
  struct msghdr less;
  struct iovec vectors[VECTORS];
  int error = is_stream(fd) ? fault(SENDMSG, CALLER, &random) : 0;
  if (error == SHORT && shorten(message, &less, vectors, random)) return moved(real(fd, &less, flags), fd, CALLER);
  if (!error || error == SHORT) return moved(real(fd, message, flags), fd, CALLER);
  if (error == EAGAIN) another_edge(fd);
  errno = error;
  return -1;
}

ssize_t recv(int fd, void *data, size_t length, int flags) {
  REAL(recv);
  uint64_t random;
  struct note *note = note_of(fd);
  if (note && note->is_news) {
    int error = fault(NEWS, CALLER, &random);
    if (!error) return real(fd, data, length, flags);
    /* What there is no room for is gone. */
    if (error == ENOBUFS) real(fd, data, length, flags | MSG_DONTWAIT);
    errno = error;
    return -1;
  }
  int error = is_stream(fd) ? fault(RECV, CALLER, &random) : 0;
  if (!error) return moved(real(fd, data, length, flags), fd, CALLER);
  if (error == SHORT) {
    /* As if the rest came a little later. */
    ssize_t got = real(fd, data, fewer(length, random), flags);
    int kept = errno;
    another_edge(fd);
    errno = kept;
    return got;
  }
  if (error == EAGAIN) another_edge(fd);
  errno = error;
  return -1;
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
  REAL(recvmsg);
  uint64_t random;
  struct msghdr less;
  struct iovec vectors[VECTORS];
  int error = is_stream(fd) ? fault(RECVMSG, CALLER, &random) : 0;
  if (error == SHORT && shorten(message, &less, vectors, random)) {
    ssize_t got = real(fd, &less, flags);
    int kept = errno;
    another_edge(fd);
    errno = kept;
    return got;
  }
  if (!error || error == SHORT) return moved(real(fd, message, flags), fd, CALLER);
  if (error == EAGAIN) another_edge(fd);
  errno = error;
  return -1;
}

int epoll_create1(int flags) {
  REAL(epoll_create1);
  FAIL(EPOLL_CREATE);
  return real(flags);
}

int epoll_ctl(int epoll, int what, int fd, struct epoll_event *event) {
  struct note *note = note_of(fd);
  if (what == EPOLL_CTL_ADD) FAIL(EPOLL_ADD);
  int ours = note && is_ours(CALLER);
  if (ours) pthread_mutex_lock(&notes_lock);
  int status = real_epoll_ctl(epoll, what, fd, event);
  if (ours) {
    for (struct watch *watch = note->watches; watch < note->watches + 2; watch++) {
      if (what == EPOLL_CTL_DEL && watch->epoll == epoll) watch->is_on = 0;
      if (what == EPOLL_CTL_ADD && status == 0 && !watch->is_on) {
        *watch = (struct watch){epoll, *event, 1};
        break;
      }
    }
    pthread_mutex_unlock(&notes_lock);
  }
  return status;
}

int epoll_wait(int epoll, struct epoll_event *events, int most, int timeout) {
  REAL(epoll_wait);
  uint64_t random;
  int error = fault(EPOLL_WAIT, CALLER, &random);
  if (error == EINTR) {
    errno = error;
    return -1;
  }
  return real(epoll, events, error == SHORT ? 1 : most, timeout);
}

int eventfd(unsigned count, int flags) {
  REAL(eventfd);
  FAIL(EVENTFD);
  return real(count, flags);
}

int setsockopt(int fd, int level, int name, const void *value, socklen_t length) {
  REAL(setsockopt);
  FAIL(SETSOCKOPT);
  return real(fd, level, name, value, length);
}

int getsockopt(int fd, int level, int name, void *value, socklen_t *length) {
  REAL(getsockopt);
  FAIL(GETSOCKOPT);
  return real(fd, level, name, value, length);
}

int getsockname(int fd, struct sockaddr *address, socklen_t *length) {
  REAL(getsockname);
  FAIL(GETSOCKNAME);
  return real(fd, address, length);
}

int getpeername(int fd, struct sockaddr *address, socklen_t *length) {
  REAL(getpeername);
  FAIL(GETPEERNAME);
  return real(fd, address, length);
}

int fcntl(int fd, int what, ...) {
  REAL(fcntl);
  FAIL(FCNTL);
  va_list arguments;
  va_start(arguments, what);
  void *argument = va_arg(arguments, void *);
  va_end(arguments);
  return real(fd, what, argument);
}

int ioctl(int fd, unsigned long what, ...) {
  REAL(ioctl);
  FAIL(IOCTL);
  va_list arguments;
  va_start(arguments, what);
  void *argument = va_arg(arguments, void *);
  va_end(arguments);
  return real(fd, what, argument);
}

ssize_t write(int fd, const void *data, size_t length) {
  REAL(write);
  FAIL(WRITE);
  return real(fd, data, length);
}

int close(int fd) {
  REAL(close);
  uint64_t random;
  int error = fault(CLOSE, CALLER, &random);
  struct note *note = note_of(fd);
  if (note) {
    pthread_mutex_lock(&notes_lock);
    note->watches[0].is_on = note->watches[1].is_on = note->is_stream = note->is_news = 0;
    pthread_mutex_unlock(&notes_lock);
  }
  int status = real(fd);
  /* Linux closes the descriptor all the same (close(2)). */
  if (error && status == 0) {
    errno = error;
    return -1;
  }
  return status;
}

int open64(const char *path, int flags, ...) {
  REAL(open64);
  FAIL(OPEN);
  va_list arguments;
  va_start(arguments, flags);
  mode_t mode = va_arg(arguments, mode_t);
  va_end(arguments);
  return real(path, flags, mode);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *argument) {
  REAL(pthread_create);
  uint64_t random;
  int error = fault(THREAD, CALLER, &random);
  return error ? error : real(thread, attributes, body, argument);
}

int getifaddrs(struct ifaddrs **list) {
  REAL(getifaddrs);
  FAIL(INTERFACES);
  return real(list);
}
