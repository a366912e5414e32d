/*
 * Stands between the plugin and libibverbs (LD_PRELOAD) and has verbs calls fail as a device, its driver or the kernel may:
 * out of memory, out of descriptors, "try again", a queue that is full half-way through a list.
 *
 * The plugin looks libibverbs's functions up by name and version (dlvsym): it gets those of this file, which call the real
 * ones. Posting and polling go through the context's own table of operations, which is changed when a device is opened.
 *
 *   FAULTY_VERBS_SEED   which faults: they follow from it and from the number of each call
 *   FAULTY_VERBS_DATA   one in so many calls that post fails
 *   FAULTY_VERBS_SETUP  one in so many of the others fails
 *   FAULTY_VERBS_POLL   one in so many polls fails: the queue is broken; 0: none
 *   FAULTY_VERBS_FLUSH  one in so many flushes is refused, and as many fail later; 0: none
 *   FAULTY_VERBS_GPU    1: host memory stands in for GPU memory behind a DMA-BUF, so that there are flushes
 *   FAULTY_VERBS_ARMED  1: from the first call on
 *   FAULTY_VERBS_RECORD 1: keeps what queue pairs and registrations were made like
 *   FAULTY_VERBS_ECE    the device whose driver offers options beyond the standard, or "all"; the others' do not know them
 *   FAULTY_VERBS_LIKE   what other devices the devices are like: see personalities.h
 *
 * A program arms it with faulty_verbs_arm(1), silences it with faulty_verbs_arm(0), and asks for the counts. With
 * faulty_verbs_fail it has the next calls of a name fail, armed or not. With faulty_verbs_made it asks for what was kept.
 *
 * A flush of the plugin's is a read through a queue pair that leads to itself; it reads nowhere else. So reads, and the
 * completion queues that they report to, are told from other requests and queues.
 *
 * Calls that fail have done nothing, with two exceptions. A list that is refused has been taken up to the refused request,
 * which is told as the device tells it. And calls that end an object do their work before they report failure, as close(2)
 * does: whoever called cannot know, and must neither use the object nor end it again. So what is left in the kernel
 * afterwards is the plugin's leak.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "injection.h"
#include "personalities.h"

/* Devices that are open at one time. */
#define CONTEXTS 64
/* Completion queues of flushes at one time. */
#define FLUSHING 64
/* Queue pairs whose attributes are kept. */
#define PAIRS 512
/* The vendor of the options beyond the standard; any number that is none of ours. */
#define VENDOR 0x1234

enum call {
  DEVICE_LIST, OPEN_DEVICE, CLOSE_DEVICE, QUERY_DEVICE, QUERY_PORT, QUERY_GID, ALLOC_PD, DEALLOC_PD, REG_MR, REG_MR_IOVA2,
  REG_DMABUF_MR, DEREG_MR, CREATE_CQ, DESTROY_CQ, CREATE_QP, MODIFY_QP,
  QUERY_QP, DESTROY_QP, QUERY_ECE, SET_ECE, GET_ASYNC_EVENT, POST_SEND, POST_RECV, POLL_CQ,
  POST_FLUSH, FLUSH, POLL_FLUSH, GID_TABLE, PORT_SPEED, CALLS
};

/* Which of the rates a call follows. */
enum rate { SETUP, DATA, POLL, READ, RATES };

static struct {
  struct target target;
  enum rate rate;
  void *real;
  /* So many calls fail now, with this error. */
  atomic_int due, due_error;
} table[CALLS] = {
  [DEVICE_LIST] = {{"get_device_list", {ENOMEM, EMFILE}}, SETUP},
  [OPEN_DEVICE] = {{"open_device", {ENOMEM, EMFILE, EAGAIN}}, SETUP},
  [CLOSE_DEVICE] = {{"close_device", {EBUSY}}, SETUP},
  [QUERY_DEVICE] = {{"query_device", {ENOMEM, EAGAIN}}, SETUP},
  [QUERY_PORT] = {{"query_port", {ENOMEM, EAGAIN}}, SETUP},
  [QUERY_GID] = {{"query_gid", {ENOMEM, EMFILE}}, SETUP},
  [ALLOC_PD] = {{"alloc_pd", {ENOMEM}}, SETUP},
  [DEALLOC_PD] = {{"dealloc_pd", {EBUSY}}, SETUP},
  [REG_MR] = {{"reg_mr", {ENOMEM, EAGAIN}}, SETUP},
  [REG_MR_IOVA2] = {{"reg_mr_iova2", {ENOMEM, EAGAIN}}, SETUP},
  [REG_DMABUF_MR] = {{"reg_dmabuf_mr", {ENOMEM, EAGAIN}}, SETUP},
  [DEREG_MR] = {{"dereg_mr", {EBUSY}}, SETUP},
  [CREATE_CQ] = {{"create_cq", {ENOMEM, EAGAIN}}, SETUP},
  [DESTROY_CQ] = {{"destroy_cq", {EBUSY}}, SETUP},
  [CREATE_QP] = {{"create_qp", {ENOMEM, EAGAIN, EINVAL}}, SETUP},
  [MODIFY_QP] = {{"modify_qp", {ENOMEM, EAGAIN, ETIMEDOUT}}, SETUP},
  [QUERY_QP] = {{"query_qp", {ENOMEM}}, SETUP},
  [DESTROY_QP] = {{"destroy_qp", {EBUSY}}, SETUP},
  [QUERY_ECE] = {{"query_ece", {ENOMEM}}, SETUP},
  [SET_ECE] = {{"set_ece", {ENOMEM}}, SETUP},
  [GET_ASYNC_EVENT] = {{"get_async_event", {EINTR}}, SETUP},
  [POST_SEND] = {{"post_send", {ENOMEM, EAGAIN, EINVAL}}, DATA},
  [POST_RECV] = {{"post_recv", {ENOMEM, EINVAL}}, DATA},
  [POLL_CQ] = {{"poll_cq", {EIO}}, POLL},
  [POST_FLUSH] = {{"post_flush", {ENOMEM, EAGAIN, EINVAL}}, READ},
  /* The device takes it, and it fails: the queue pair has stopped. By order also: the key of what is read is wrong
   * (EACCES), or that of where it goes (EFAULT). */
  [FLUSH] = {{"flush", {ESHUTDOWN}}, READ},
  [POLL_FLUSH] = {{"poll_flush", {EIO}}, POLL},
  /* These never fail by chance. */
  [GID_TABLE] = {{"query_gid_table", {}}, SETUP},
  [PORT_SPEED] = {{"query_port_speed", {}}, SETUP},
};

static atomic_int armed;
static unsigned rates[RATES] = {20, 500, 0, 0};
static int has_gpu, keeps;
static const char *offers_ece;

static unsigned long number_from(const char *name, unsigned long otherwise) {
  const char *set = getenv(name);
  return set ? strtoul(set, NULL, 0) : otherwise;
}

__attribute__((constructor)) static void begin(void) {
  seed = number_from("FAULTY_VERBS_SEED", 1);
  rates[SETUP] = (unsigned)number_from("FAULTY_VERBS_SETUP", 20);
  rates[DATA] = (unsigned)number_from("FAULTY_VERBS_DATA", 500);
  rates[POLL] = (unsigned)number_from("FAULTY_VERBS_POLL", 0);
  rates[READ] = (unsigned)number_from("FAULTY_VERBS_FLUSH", 0);
  has_gpu = (int)number_from("FAULTY_VERBS_GPU", 0);
  offers_ece = getenv("FAULTY_VERBS_ECE");
  keeps = offers_ece || number_from("FAULTY_VERBS_RECORD", 0);
  choose_personality();
  atomic_store(&armed, (int)number_from("FAULTY_VERBS_ARMED", 0));
}

/* The next so many calls of that name fail with that error. How many were still to fail; -1: no such call. */
int faulty_verbs_fail(const char *name, int error, int times) {
  for (int call = 0; call < CALLS; call++)
    if (!strcmp(name, table[call].target.name)) {
      atomic_store(&table[call].due_error, error);
      return atomic_exchange(&table[call].due, times);
    }
  return -1;
}

/* Devices that are like "vanishing" are gone, or back. */
int faulty_verbs_vanish(int on) {
  atomic_store(&has_vanished, on);
  return 1;
}

/* Whether the plugin has found its functions here. */
int faulty_verbs_arm(int on) {
  atomic_store(&armed, on);
  return table[OPEN_DEVICE].real != NULL;
}

/* A line for each call and kind, with the calls made while armed. Returns the length of the text. */
int faulty_verbs_report(char *text, int room) {
  int at = 0;
  for (int call = 0; call < CALLS; call++) at = report(&table[call].target, text, at, room);
  return at;
}

/* Which fault this call meets: an errno, or 0 for none. */
static int fault(enum call call, uint64_t *random) {
  *random = 0;
  for (int due = atomic_load(&table[call].due); due > 0;)
    if (atomic_compare_exchange_weak(&table[call].due, &due, due - 1)) return atomic_load(&table[call].due_error);
  if (!atomic_load_explicit(&armed, memory_order_relaxed)) return 0;
  unsigned number = atomic_fetch_add(&table[call].target.calls, 1);
  unsigned one_in = rates[table[call].rate];
  *random = chance(call, number);
  if (!one_in || *random % one_in) return 0;
  *random = mix(*random);
  return next_fault(&table[call].target);
}

/* What queue pairs were made like, in the order of their making, and how many registrations allow reordering or not. */
static struct pair {
  struct ibv_qp *qp;
  char device[IBV_SYSFS_NAME_MAX];
  unsigned options;
  int ece_calls, is_connected;
  struct ibv_qp_attr attr;
  /* Work requests posted: plain writes, those with an immediate, reads; and calls that posted them. */
  unsigned writes, immediates, reads, calls;
  /* Into how many pieces writes were cut. */
  unsigned pieces;
  /* What both sides' drivers know, once it is connected. */
  unsigned agreed;
} pairs[PAIRS];
static int made;
static unsigned regions[2];
static pthread_mutex_t keeping = PTHREAD_MUTEX_INITIALIZER;

/* The latest with this address, which may have been another's before. */
static struct pair *pair_of(const struct ibv_qp *qp) {
  for (int at = made - 1; at >= 0; at--)
    if (pairs[at].qp == qp) return &pairs[at];
  abort();
}

static int offers(const char *device) { return offers_ece && (!strcmp(offers_ece, "all") || !strcmp(offers_ece, device)); }

static void keep_pair(struct ibv_qp *qp) {
  if (!keeps || !qp) return;
  const char *device = qp->context->device->name;
  pthread_mutex_lock(&keeping);
  if (made == PAIRS) abort();
  /* What the drivers offer differs by device, so that what both know is less than each knows. */
  unsigned own = device[strlen(device) - 1] % 2 ? 0xf3 : 0x3f;
  pairs[made] = (struct pair){.qp = qp, .options = own};
  snprintf(pairs[made++].device, IBV_SYSFS_NAME_MAX, "%s", device);
  pthread_mutex_unlock(&keeping);
}

static void keep_attributes(const struct ibv_qp *qp, const struct ibv_qp_attr *attr, int mask) {
  if (!keeps) return;
  pthread_mutex_lock(&keeping);
  struct pair *pair = pair_of(qp);
  struct ibv_qp_attr *kept = &pair->attr;
  if (mask & IBV_QP_PKEY_INDEX) kept->pkey_index = attr->pkey_index;
  if (mask & IBV_QP_AV) {
    kept->ah_attr = attr->ah_attr;
    pair->is_connected = 1;
    /* As mlx5 does: what was agreed can be asked for when the queue pair is ready to receive. */
    if (pair->ece_calls) pair->options = pair->agreed;
  }
  if (mask & IBV_QP_TIMEOUT) kept->timeout = attr->timeout;
  if (mask & IBV_QP_RETRY_CNT) kept->retry_cnt = attr->retry_cnt;
  pthread_mutex_unlock(&keeping);
}

static void keep_posted(const struct ibv_qp *qp, const struct ibv_send_wr *first) {
  if (!keeps) return;
  pthread_mutex_lock(&keeping);
  struct pair *pair = pair_of(qp);
  pair->calls++;
  for (const struct ibv_send_wr *at = first; at; at = at->next)
    ++*(at->opcode == IBV_WR_RDMA_READ ? &pair->reads : at->opcode == IBV_WR_RDMA_WRITE ? &pair->writes : &pair->immediates);
  pthread_mutex_unlock(&keeping);
}

static void keep_region(unsigned access) {
  if (!keeps) return;
  pthread_mutex_lock(&keeping);
  regions[!!(access & IBV_ACCESS_RELAXED_ORDERING)]++;
  pthread_mutex_unlock(&keeping);
}

/* A line for each queue pair that was connected, and one for registrations. Returns the length of the text. */
int faulty_verbs_made(char *text, int room) {
  int at = 0;
  pthread_mutex_lock(&keeping);
  for (struct pair *pair = pairs; pair < pairs + made; pair++)
    if (pair->is_connected) at += snprintf(text + at, (size_t)(room - at),
                   "%s pkey=%d sl=%d tc=%d gid=%d timeout=%d retries=%d set_ece=%d ece=%#x writes=%u immediates=%u "
                   "reads=%u calls=%u pieces=%u\n", pair->device,
                   pair->attr.pkey_index, pair->attr.ah_attr.sl, pair->attr.ah_attr.grh.traffic_class,
                   pair->attr.ah_attr.grh.sgid_index, pair->attr.timeout, pair->attr.retry_cnt, pair->ece_calls,
                   pair->options, pair->writes, pair->immediates, pair->reads, pair->calls, pair->pieces);
  at += snprintf(text + at, (size_t)(room - at), "regions strict=%u relaxed=%u\n", regions[0], regions[1]);
  pthread_mutex_unlock(&keeping);
  return at;
}

/* The bodies of the wrappers, by how the call tells of its failure. */
#define NULL_AND_ERRNO(call, type, arguments) \
  do { \
    uint64_t random; \
    int error = fault(call, &random); \
    if (error) { \
      errno = error; \
      return NULL; \
    } \
    return ((type)table[call].real) arguments; \
  } while (0)

#define MINUS_ONE_AND_ERRNO(call, type, arguments) \
  do { \
    uint64_t random; \
    int error = fault(call, &random); \
    if (error) { \
      errno = error; \
      return -1; \
    } \
    return ((type)table[call].real) arguments; \
  } while (0)

#define ERROR_NUMBER(call, type, arguments) \
  do { \
    uint64_t random; \
    int error = fault(call, &random); \
    return error ? error : ((type)table[call].real) arguments; \
  } while (0)

/* Does its work, and may say that it did not. */
#define ENDS(call, type, object) \
  do { \
    uint64_t random; \
    int status = ((type)table[call].real)(object); \
    int error = status ? 0 : fault(call, &random); \
    return error ? error : status; \
  } while (0)

/* The beginning of the wrappers of calls that a device which is gone does not answer. */
#define EIO_IF_GONE(device) \
  do { \
    if (is_gone(device)) return errno = EIO; \
  } while (0)

#define MINUS_ONE_IF_GONE(device) \
  do { \
    if (is_gone(device)) { \
      errno = EIO; \
      return -1; \
    } \
  } while (0)

#define NULL_IF_GONE(device) \
  do { \
    if (is_gone(device)) { \
      errno = EIO; \
      return NULL; \
    } \
  } while (0)

static struct ibv_device **real_device_list(int *count) {
  NULL_AND_ERRNO(DEVICE_LIST, struct ibv_device **(*)(int *), (count));
}

static struct ibv_device **get_device_list(int *count) {
  struct ibv_device **list = real_device_list(count);
  disguise_devices(list);
  return list;
}

static int real_device(struct ibv_context *context, struct ibv_device_attr *attr) {
  EIO_IF_GONE(context->device);
  ERROR_NUMBER(QUERY_DEVICE, int (*)(struct ibv_context *, struct ibv_device_attr *), (context, attr));
}

static int query_device(struct ibv_context *context, struct ibv_device_attr *attr) {
  int status = real_device(context, attr);
  if (!status) disguise_device(context->device, attr);
  return status;
}

static int real_port(struct ibv_context *context, uint8_t port, void *attr) {
  EIO_IF_GONE(context->device);
  ERROR_NUMBER(QUERY_PORT, int (*)(struct ibv_context *, uint8_t, void *), (context, port, attr));
}

static int query_port(struct ibv_context *context, uint8_t port, void *attr) {
  int status = real_port(context, port, attr);
  if (!status) disguise_port(context->device, attr);
  return status;
}

static int real_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid) {
  MINUS_ONE_IF_GONE(context->device);
  MINUS_ONE_AND_ERRNO(QUERY_GID, int (*)(struct ibv_context *, uint8_t, int, union ibv_gid *), (context, port, index, gid));
}

static int query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid) {
  int status = real_gid(context, port, index, gid);
  if (!status && is_infiniband(context->device)) {
    /* That of its IPv4 address leads to it. */
    for (int at = 0; at < 16; at++) {
      union ibv_gid candidate;
      if (real_gid(context, port, at, &candidate) || candidate.raw[10] != 0xff || candidate.raw[11] != 0xff) continue;
      truth[number_of(context->device)].gid = candidate;
      truth[number_of(context->device)].place = at;
      break;
    }
    *gid = gid_of(number_of(context->device));
  }
  return status;
}

static ssize_t query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t most, uint32_t flags,
                               size_t size) {
  /* SoftRoCE's is of RoCE. */
  if (is_infiniband(context->device)) return -EOPNOTSUPP;
  return ((ssize_t (*)(struct ibv_context *, struct ibv_gid_entry *, size_t, uint32_t, size_t))table[GID_TABLE].real)(
      context, entries, most, flags, size);
}

/* In units of 100 Mbit/s. */
static int query_port_speed(struct ibv_context *context, uint32_t, uint64_t *speed) {
  if (!is_like("bonded", context->device)) return EOPNOTSUPP;
  *speed = 16000;
  return 0;
}

static struct ibv_pd *alloc_pd(struct ibv_context *context) {
  NULL_IF_GONE(context->device);
  NULL_AND_ERRNO(ALLOC_PD, struct ibv_pd *(*)(struct ibv_context *), (context));
}

static int dealloc_pd(struct ibv_pd *pd) { ENDS(DEALLOC_PD, int (*)(struct ibv_pd *), pd); }

static struct ibv_mr *real_mr(struct ibv_pd *pd, void *address, size_t length, int access) {
  NULL_IF_GONE(pd->context->device);
  keep_region((unsigned)access);
  NULL_AND_ERRNO(REG_MR, struct ibv_mr *(*)(struct ibv_pd *, void *, size_t, int), (pd, address, length, access));
}

static struct ibv_mr *reg_mr(struct ibv_pd *pd, void *address, size_t length, int access) {
  struct ibv_mr *mr = real_mr(pd, address, length, access);
  withhold(mr, MADV_DONTFORK);
  return mr;
}

static struct ibv_mr *real_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned access) {
  NULL_IF_GONE(pd->context->device);
  keep_region(access);
  NULL_AND_ERRNO(REG_MR_IOVA2, struct ibv_mr *(*)(struct ibv_pd *, void *, size_t, uint64_t, unsigned),
                 (pd, address, length, iova, access));
}

static struct ibv_mr *reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned access) {
  struct ibv_mr *mr = real_mr_iova2(pd, address, length, iova, access);
  withhold(mr, MADV_DONTFORK);
  return mr;
}

/* Host memory in place of a GPU's: its address is that on the network. */
static struct ibv_mr *reg_gpu(struct ibv_pd *pd, uint64_t, size_t length, uint64_t iova, int fd, int access) {
  if (fd < 0) {
    errno = EBADF;
    return NULL;
  }
  return ((struct ibv_mr * (*)(struct ibv_pd *, void *, size_t, uint64_t, unsigned)) table[REG_MR_IOVA2].real)(
      pd, (void *)(uintptr_t)iova, length, iova, (unsigned)access);
}

static struct ibv_mr *reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
  if (has_gpu || is_like("mlx5", pd->context->device)) table[REG_DMABUF_MR].real = reg_gpu;
  NULL_AND_ERRNO(REG_DMABUF_MR, struct ibv_mr *(*)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int),
                 (pd, offset, length, iova, fd, access));
}

static int dereg_mr(struct ibv_mr *mr) {
  withhold(mr, MADV_DOFORK);
  ENDS(DEREG_MR, int (*)(struct ibv_mr *), mr);
}

static struct ibv_cq *create_cq(struct ibv_context *context, int entries, void *cookie, struct ibv_comp_channel *channel,
                                int vector) {
  NULL_IF_GONE(context->device);
  entries *= room_factor(context->device);
  NULL_AND_ERRNO(CREATE_CQ, struct ibv_cq *(*)(struct ibv_context *, int, void *, struct ibv_comp_channel *, int),
                 (context, entries, cookie, channel, vector));
}

/* The completion queues of flushes. */
static _Atomic(struct ibv_cq *) flushing[FLUSHING];

static int is_flushing(struct ibv_cq *cq) {
  for (int at = 0; at < FLUSHING; at++)
    if (atomic_load_explicit(&flushing[at], memory_order_relaxed) == cq) return 1;
  return 0;
}

static void now_flushing(struct ibv_cq *cq) {
  if (is_flushing(cq)) return;
  for (int at = 0; at < FLUSHING; at++) {
    struct ibv_cq *none = NULL;
    if (atomic_compare_exchange_strong(&flushing[at], &none, cq)) return;
  }
  abort();
}

static int destroy_cq(struct ibv_cq *cq) {
  for (int at = 0; at < FLUSHING; at++) {
    struct ibv_cq *ended = cq;
    atomic_compare_exchange_strong(&flushing[at], &ended, NULL);
  }
  ENDS(DESTROY_CQ, int (*)(struct ibv_cq *), cq);
}

static struct ibv_qp *create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr) {
  NULL_IF_GONE(pd->context->device);
  uint64_t random;
  int error = fault(CREATE_QP, &random);
  if (!error) error = refuses_pair(pd->context->device, attr);
  if (error) {
    errno = error;
    return NULL;
  }
  uint32_t asked = attr->cap.max_send_wr;
  int factor = room_factor(pd->context->device);
  attr->cap.max_send_wr *= (uint32_t)factor;
  struct ibv_qp *qp = ((struct ibv_qp * (*)(struct ibv_pd *, struct ibv_qp_init_attr *)) table[CREATE_QP].real)(pd, attr);
  if (factor > 1) attr->cap.max_send_wr = asked;
  const struct limits *its = limits_of(pd->context->device);
  if (qp && its && attr->cap.max_inline_data > its->inline_bytes) attr->cap.max_inline_data = its->inline_bytes;
  keep_pair(qp);
  return qp;
}

static int modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask) {
  EIO_IF_GONE(qp->context->device);
  keep_attributes(qp, attr, mask);
  int refusal = refuses_change(qp, attr, mask);
  if (refusal) return refusal;
  struct ibv_qp_attr translated = *attr;
  if (mask & IBV_QP_AV && is_infiniband(qp->context->device)) {
    if (!translate_address(qp->context->device, &translated.ah_attr)) return EINVAL;
    attr = &translated;
  }
  ERROR_NUMBER(MODIFY_QP, int (*)(struct ibv_qp *, struct ibv_qp_attr *, int), (qp, attr, mask));
}

static int query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init) {
  EIO_IF_GONE(qp->context->device);
  ERROR_NUMBER(QUERY_QP, int (*)(struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_qp_init_attr *),
               (qp, attr, mask, init));
}

static int destroy_qp(struct ibv_qp *qp) { ENDS(DESTROY_QP, int (*)(struct ibv_qp *), qp); }

/* A driver that offers options, or none, in place of the real one. */
static int query_stand_in(struct ibv_qp *qp, struct ibv_ece *ece) {
  pthread_mutex_lock(&keeping);
  struct pair *pair = pair_of(qp);
  int status = offers(pair->device) ? 0 : EOPNOTSUPP;
  if (!status) *ece = (struct ibv_ece){.vendor_id = VENDOR, .options = pair->options};
  pthread_mutex_unlock(&keeping);
  return status;
}

static int set_stand_in(struct ibv_qp *qp, struct ibv_ece *ece) {
  pthread_mutex_lock(&keeping);
  struct pair *pair = pair_of(qp);
  int status = ece->vendor_id != VENDOR || ece->comp_mask ? EINVAL : !offers(pair->device) ? EOPNOTSUPP : 0;
  pair->ece_calls++;
  if (!status) {
    pair->agreed = pair->options & ece->options;
    pair->options = 0;
  }
  pthread_mutex_unlock(&keeping);
  return status;
}

static int query_ece(struct ibv_qp *qp, struct ibv_ece *ece) {
  if (offers_ece) table[QUERY_ECE].real = query_stand_in;
  ERROR_NUMBER(QUERY_ECE, int (*)(struct ibv_qp *, struct ibv_ece *), (qp, ece));
}

static int set_ece(struct ibv_qp *qp, struct ibv_ece *ece) {
  if (offers_ece) table[SET_ECE].real = set_stand_in;
  ERROR_NUMBER(SET_ECE, int (*)(struct ibv_qp *, struct ibv_ece *), (qp, ece));
}

static int real_event(struct ibv_context *context, struct ibv_async_event *event) {
  MINUS_ONE_AND_ERRNO(GET_ASYNC_EVENT, int (*)(struct ibv_context *, struct ibv_async_event *), (context, event));
}

static int get_async_event(struct ibv_context *context, struct ibv_async_event *event) {
  int status = real_event(context, event);
  /* Once, in place of whatever it was: an event of a port, which is acknowledged alike. */
  static atomic_int is_told;
  if (!status && is_gone(context->device) && !atomic_exchange(&is_told, 1)) event->event_type = IBV_EVENT_DEVICE_FATAL;
  return status;
}

/* The operations that the contexts had. A context stays in its place until another one gets its address. */
static struct opened {
  _Atomic(struct ibv_context *) context;
  struct ibv_context_ops ops;
} opened[CONTEXTS];
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

static const struct ibv_context_ops *real_ops(struct ibv_context *context) {
  for (struct opened *at = opened; at < opened + CONTEXTS; at++)
    if (atomic_load_explicit(&at->context, memory_order_acquire) == context) return &at->ops;
  /* Operations are changed only after they were kept. */
  abort();
}

/* The body of a call that posts a list. Of one that it refuses any number of requests, also none, go before. */
#define POSTS(call, request, post) \
  do { \
    const struct ibv_context_ops *ops = real_ops(qp->context); \
    uint64_t random; \
    int error = fault(call, &random); \
    if (!error) return ops->post(qp, first, bad); \
    unsigned count = 0; \
    for (struct request *at = first; at; at = at->next) count++; \
    struct request *refused = first, *last = NULL; \
    for (unsigned left = (unsigned)(random % count); left > 0; left--) { \
      last = refused; \
      refused = refused->next; \
    } \
    if (last) { \
      last->next = NULL; \
      int status = ops->post(qp, first, bad); \
      last->next = refused; \
      if (status) return status; \
    } \
    *bad = refused; \
    return error; \
  } while (0)

static int post_flush(struct ibv_qp *qp, struct ibv_send_wr *read, struct ibv_send_wr **bad) {
  now_flushing(qp->send_cq);
  uint64_t random;
  int error = fault(POST_FLUSH, &random);
  struct ibv_send_wr wrong = *read;
  struct ibv_sge target = *read->sg_list;
  wrong.sg_list = &target;
  struct ibv_qp_attr stopped = {.qp_state = IBV_QPS_ERR};
  if (!error) switch (fault(FLUSH, &random)) {
    case EACCES: wrong.wr.rdma.rkey ^= 1; break;
    case EFAULT: target.lkey ^= 1; break;
    case ESHUTDOWN:
      error = ((int (*)(struct ibv_qp *, struct ibv_qp_attr *, int))table[MODIFY_QP].real)(qp, &stopped, IBV_QP_STATE);
    }
  if (!error) error = real_ops(qp->context)->post_send(qp, &wrong, bad);
  if (error) *bad = read;
  return error;
}

/* Posts a list, its writes cut. */
static int post_in_pieces(struct ibv_qp *qp, struct ibv_send_wr *first, struct ibv_send_wr **bad) {
  static atomic_uint number;
  const struct ibv_context_ops *ops = real_ops(qp->context);
  for (struct ibv_send_wr *at = first; at; at = at->next) {
    struct ibv_send_wr pieces[PIECES], *refused;
    struct ibv_sge memory[PIECES];
    int count = cut(at, chance(POST_SEND, atomic_fetch_add(&number, 1)), pieces, memory);
    if (!count) pieces[count++] = *at, pieces[0].next = NULL;
    if (keeps && count > 1) {
      pthread_mutex_lock(&keeping);
      pair_of(qp)->pieces += (unsigned)count;
      pthread_mutex_unlock(&keeping);
    }
    for (int piece = 0; piece < count; piece++) {
      int status = ops->post_send(qp, &pieces[piece], &refused);
      if (!status) continue;
      *bad = at;
      return status;
    }
  }
  return 0;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *first, struct ibv_send_wr **bad) {
  if (is_gone(qp->context->device)) return 0;
  keep_posted(qp, first);
  if (is_like("reordering", qp->context->device) && first->opcode != IBV_WR_RDMA_READ) return post_in_pieces(qp, first, bad);
  if (first->opcode == IBV_WR_RDMA_READ) return post_flush(qp, first, bad);
  POSTS(POST_SEND, ibv_send_wr, post_send);
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *first, struct ibv_recv_wr **bad) {
  if (is_gone(qp->context->device)) return 0;
  POSTS(POST_RECV, ibv_recv_wr, post_recv);
}

static int poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *completions) {
  if (is_gone(cq->context->device)) return 0;
  const struct ibv_context_ops *ops = real_ops(cq->context);
  uint64_t random;
  int error = fault(is_flushing(cq) ? POLL_FLUSH : POLL_CQ, &random);
  if (!error) return ops->poll_cq(cq, most, completions);
  errno = error;
  return -1;
}

static struct ibv_context *open_device(struct ibv_device *device) {
  uint64_t random;
  int error = fault(OPEN_DEVICE, &random);
  if (error) {
    errno = error;
    return NULL;
  }
  struct ibv_context *context = ((struct ibv_context * (*)(struct ibv_device *)) table[OPEN_DEVICE].real)(device);
  if (!context) return NULL;
  pthread_mutex_lock(&opening);
  struct opened *place = opened;
  while (place < opened + CONTEXTS && place->context && place->context != context) place++;
  if (place == opened + CONTEXTS) abort();
  place->ops = context->ops;
  atomic_store_explicit(&place->context, context, memory_order_release);
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  context->ops.poll_cq = poll_cq;
  pthread_mutex_unlock(&opening);
  return context;
}

static int close_device(struct ibv_context *context) {
  int status = ((int (*)(struct ibv_context *))table[CLOSE_DEVICE].real)(context);
  uint64_t random;
  int error = status ? 0 : fault(CLOSE_DEVICE, &random);
  if (!error) return status;
  errno = error;
  return -1;
}

static const struct {
  const char *name;
  enum call call;
  void *wrapper;
} wrappers[] = {
  {"ibv_get_device_list", DEVICE_LIST, get_device_list},
  {"ibv_open_device", OPEN_DEVICE, open_device},
  {"ibv_close_device", CLOSE_DEVICE, close_device},
  {"ibv_query_device", QUERY_DEVICE, query_device},
  {"ibv_query_port", QUERY_PORT, query_port},
  {"ibv_query_gid", QUERY_GID, query_gid},
  {"ibv_alloc_pd", ALLOC_PD, alloc_pd},
  {"ibv_dealloc_pd", DEALLOC_PD, dealloc_pd},
  {"ibv_reg_mr", REG_MR, reg_mr},
  {"ibv_reg_mr_iova2", REG_MR_IOVA2, reg_mr_iova2},
  {"ibv_reg_dmabuf_mr", REG_DMABUF_MR, reg_dmabuf_mr},
  {"ibv_dereg_mr", DEREG_MR, dereg_mr},
  {"ibv_create_cq", CREATE_CQ, create_cq},
  {"ibv_destroy_cq", DESTROY_CQ, destroy_cq},
  {"ibv_create_qp", CREATE_QP, create_qp},
  {"ibv_modify_qp", MODIFY_QP, modify_qp},
  {"ibv_query_qp", QUERY_QP, query_qp},
  {"ibv_destroy_qp", DESTROY_QP, destroy_qp},
  {"ibv_query_ece", QUERY_ECE, query_ece},
  {"ibv_set_ece", SET_ECE, set_ece},
  {"ibv_get_async_event", GET_ASYNC_EVENT, get_async_event},
  {"_ibv_query_gid_table", GID_TABLE, query_gid_table},
  {"ibv_query_port_speed", PORT_SPEED, query_port_speed},
};

/* What the plugin looks functions up with; nothing else in the process asks for those names. */
void *dlvsym(void *library, const char *name, const char *version) {
  static void *(*real)(void *, const char *, const char *);
  if (!real) real = (void *(*)(void *, const char *, const char *))dlsym(RTLD_NEXT, "dlvsym");
  void *found = real(library, name, version);
  /* The libibverbs of the test machine is older than this one. */
  if (!found && !strcmp(name, "ibv_query_port_speed")) return query_port_speed;
  if (!found) return NULL;
  for (size_t at = 0; at < sizeof wrappers / sizeof *wrappers; at++)
    if (!strcmp(name, wrappers[at].name)) {
      table[wrappers[at].call].real = found;
      return wrappers[at].wrapper;
    }
  return found;
}
