/*
 * Devices that behave as others than SoftRoCE do, for faulty_verbs.c.
 *
 *   FAULTY_VERBS_LIKE    what devices are like; none: as they are
 *   FAULTY_VERBS_DEVICE  the one device that is like that; none: all of them
 *   FAULTY_VERBS_SLOW    SLOW below, in ms; none: 300
 *
 *   efa       a transport of the vendor's own, no link layer, no reliable connections
 *   iwarp     the iWARP transport on Ethernet; queue pairs are not connected by their numbers
 *   refusing  all looks well, and no reliable-connected queue pair is made (a virtual function without the right)
 *   slow      the kernel finds the peer's address late: connecting a queue pair takes SLOW ms and fails with ETIMEDOUT
 *             twice, then works
 *   late      a queue pair is ready to receive SLOW ms after it was asked to be
 *   mlx5, bnxt, irdma
 *             the limits of such cards: see `limits`. With mlx5 memory may come through DMA-BUF, so that the kernel
 *             complains of a descriptor that is none
 *   reordering
 *             a fabric with adaptive routing: each plain write arrives in pieces in any order, its last byte first
 *   bonded    the driver says that a port is as fast as several, if it is asked (a newer libibverbs)
 *   old-kernel
 *             pages of registered memory are kept out of forked children, as libibverbs does before Linux 5.12
 *   vanishing after faulty_verbs_vanish the device is gone from the bus: nothing that is posted goes out, nothing completes,
 *             every call to the kernel fails with EIO, and the next asynchronous event says that the device failed
 *   infiniband, infiniband-global
 *             ports with local identifiers; of the second kind such that need the global header. How queue pairs are
 *             addressed is checked, and then put into SoftRoCE's terms
 */
#ifndef PERSONALITIES_H
#define PERSONALITIES_H

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const char *like, *like_device;
static unsigned slow_ms;

static void choose_personality(void) {
  like = getenv("FAULTY_VERBS_LIKE");
  like_device = getenv("FAULTY_VERBS_DEVICE");
  const char *slow = getenv("FAULTY_VERBS_SLOW");
  slow_ms = slow ? (unsigned)strtoul(slow, NULL, 0) : 300;
}

static int is_like(const char *what, const struct ibv_device *device) {
  return like && !strcmp(like, what) && (!like_device || !strcmp(like_device, device->name));
}

static atomic_int has_vanished;

/* Whether the device is gone from the bus. */
static int is_gone(const struct ibv_device *device) { return atomic_load(&has_vanished) && is_like("vanishing", device); }

static void disguise_devices(struct ibv_device **list) {
  for (; list && *list; list++) {
    if (is_like("efa", *list)) (*list)->transport_type = IBV_TRANSPORT_UNSPECIFIED;
    if (is_like("iwarp", *list)) (*list)->transport_type = IBV_TRANSPORT_IWARP;
  }
}

/* The last digit of its name. */
static unsigned number_of(const struct ibv_device *device) { return device->name[strlen(device->name) - 1] & 15; }

static int is_infiniband(const struct ibv_device *device) {
  return is_like("infiniband", device) || is_like("infiniband-global", device);
}

static uint16_t lid_of(const struct ibv_device *device) { return (uint16_t)(number_of(device) + 40); }

/* The only GID of such a port: link-local, with the number of the device at its end. */
static union ibv_gid gid_of(unsigned number) {
  return (union ibv_gid){.raw = {0xfe, 0x80, [8] = 2, [9] = 2, [10] = 0xc9, [15] = (uint8_t)number}};
}

static void disguise_port(const struct ibv_device *device, struct ibv_port_attr *attr) {
  if (is_like("efa", device)) attr->link_layer = IBV_LINK_LAYER_UNSPECIFIED;
  if (!is_infiniband(device)) return;
  attr->link_layer = IBV_LINK_LAYER_INFINIBAND;
  attr->lid = lid_of(device);
  attr->gid_tbl_len = 1;
  /* RoCE needs it always. */
  attr->flags &= (uint8_t)~IBV_QPF_GRH_REQUIRED;
  if (is_like("infiniband-global", device)) attr->flags |= IBV_QPF_GRH_REQUIRED;
}

/* What cards grant: bytes inside a request, and requests in a queue. */
static const struct limits {
  const char *like;
  uint32_t inline_bytes;
  int requests;
} limits[] = {{"mlx5", 828, 8192}, {"bnxt", 96, 340}, {"irdma", 0, 400}};

static const struct limits *limits_of(const struct ibv_device *device) {
  for (size_t at = 0; at < sizeof limits / sizeof *limits; at++)
    if (is_like(limits[at].like, device)) return &limits[at];
  return NULL;
}

static void disguise_device(const struct ibv_device *device, struct ibv_device_attr *attr) {
  const struct limits *its = limits_of(device);
  if (its) attr->max_qp_wr = its->requests;
}

/* The error with which the device refuses to make such a queue pair, or 0. */
static int refuses_pair(const struct ibv_device *device, const struct ibv_qp_init_attr *attr) {
  if (attr->qp_type != IBV_QPT_RC) return 0;
  if (is_like("efa", device)) return EOPNOTSUPP;
  if (is_like("refusing", device)) return EPERM;
  const struct limits *its = limits_of(device);
  if (!its) return 0;
  uint32_t most = (uint32_t)its->requests;
  return attr->cap.max_inline_data > its->inline_bytes || attr->cap.max_send_wr > most || attr->cap.max_recv_wr > most
             ? EINVAL
             : 0;
}

/* How often a slow device says that it has not found the peer's address. */
#define SLOW_TIMES 2
#define SLOW_PAIRS 512

static struct slow_pair {
  _Atomic(uint32_t) number;
  atomic_int refusals;
} slow_pairs[SLOW_PAIRS];

/* The error with which the device refuses to change a queue pair, or 0. */
static int refuses_change(const struct ibv_qp *qp, const struct ibv_qp_attr *attr, int mask) {
  const struct ibv_device *device = qp->context->device;
  if (!(mask & IBV_QP_STATE) || attr->qp_state != IBV_QPS_RTR) return 0;
  if (is_like("iwarp", device)) return EINVAL;
  if (is_like("slow", device) || is_like("late", device)) usleep(slow_ms * 1000);
  if (!is_like("slow", device)) return 0;
  /* Its number is told from those of other devices by the device's last digit. */
  uint32_t number = qp->qp_num << 4 | number_of(device);
  for (struct slow_pair *at = slow_pairs; at < slow_pairs + SLOW_PAIRS; at++) {
    uint32_t none = 0;
    if (at->number != number && !atomic_compare_exchange_strong(&at->number, &none, number) && none != number) continue;
    return atomic_fetch_add(&at->refusals, 1) < SLOW_TIMES ? ETIMEDOUT : 0;
  }
  abort();
}

/* Keeps the pages of a region out of forked children, or lets them in again. */
static void withhold(const struct ibv_mr *mr, int advice) {
  if (!mr || !is_like("old-kernel", mr->context->device)) return;
  uintptr_t first = (uintptr_t)mr->addr & ~(uintptr_t)4095, end = ((uintptr_t)mr->addr + mr->length + 4095) & ~(uintptr_t)4095;
  madvise((void *)first, end - first, advice);
}

/* Pieces of a write. */
#define PIECES 4

/* Queues must hold this many times as much. */
static int room_factor(const struct ibv_device *device) { return is_like("reordering", device) ? PIECES : 1; }

/* Cuts a write of one piece of memory into so many, each a request of its own in the order of their posting; only the last
 * one reports. Returns how many. */
static int cut(const struct ibv_send_wr *write, uint64_t random, struct ibv_send_wr *pieces, struct ibv_sge *memory) {
  if (write->opcode != IBV_WR_RDMA_WRITE || write->num_sge != 1 || write->sg_list->length < 8) return 0;
  uint32_t length = write->sg_list->length, part = (length - 1) / (PIECES - 1);
  /* The last byte, then the others: their beginnings and ends. */
  uint32_t from[PIECES] = {length - 1}, to[PIECES] = {length};
  for (int at = 1; at < PIECES; at++) {
    int place = 1 + (int)((random + (uint64_t)at) % (PIECES - 1));
    from[at] = (uint32_t)(place - 1) * part;
    to[at] = place == PIECES - 1 ? length - 1 : (uint32_t)place * part;
  }
  for (int at = 0; at < PIECES; at++) {
    memory[at] = *write->sg_list;
    memory[at].addr += from[at];
    memory[at].length = to[at] - from[at];
    pieces[at] = *write;
    pieces[at].next = NULL;
    pieces[at].sg_list = &memory[at];
    pieces[at].wr.rdma.remote_addr += from[at];
    if (at + 1 < PIECES) pieces[at].send_flags &= ~(unsigned)IBV_SEND_SIGNALED;
  }
  return PIECES;
}

/* How SoftRoCE's devices are reached in truth, by their numbers. */
static struct {
  union ibv_gid gid;
  int place;
} truth[16];

/* Checks how a queue pair is addressed on InfiniBand, and puts it into SoftRoCE's terms. Says whether it was right. */
static int translate_address(const struct ibv_device *device, struct ibv_ah_attr *address) {
  unsigned peer = address->dlid - 40u;
  int is_global = is_like("infiniband-global", device);
  union ibv_gid expected = gid_of(peer);
  if (peer > 15 || address->is_global != is_global ||
      (is_global && (memcmp(&address->grh.dgid, &expected, sizeof expected) || address->grh.sgid_index))) {
    fprintf(stderr, "a wrong address: LID %u, global %u\n", address->dlid, address->is_global);
    return 0;
  }
  address->is_global = 1;
  address->dlid = 0;
  address->grh = (struct ibv_global_route){.dgid = truth[peer].gid, .hop_limit = 64};
  address->grh.sgid_index = (uint8_t)truth[number_of(device)].place;
  return 1;
}

#endif
