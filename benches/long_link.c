/*
 * A long link between two network namespaces, in user space: for kernels without netem.
 *
 *   long_link NEAR FAR DELAY_US RATE_BIT_PER_S LOSS_PERCENT
 *
 * Makes a TUN interface eth0 in the namespaces NEAR and FAR and carries packets between them until it is ended. In each direction a
 * packet is lost by chance, or waits its turn at the rate and then DELAY_US. The queue before the rate holds QUEUE packets, as
 * netem's with `limit 100000`. Packets leave within SLACK_NS of their time.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define QUEUE 100000
#define SLACK_NS 50000
#define LARGEST 9216

struct packet {
  int64_t due;
  size_t length;
  char bytes[];
};

struct direction {
  int from, to;
  uint64_t chance;
};

static int64_t delay_ns;
static double ns_per_byte, loss;

static void check(int ok, const char *what) {
  if (!ok) {
    perror(what);
    exit(1);
  }
}

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* A number from 0 to 1 (xorshift). */
static double chance(uint64_t *state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return (double)(*state >> 11) / (double)(1ULL << 53);
}

static void *carry(void *argument) {
  struct direction *way = argument;
  static __thread struct packet *queue[QUEUE];
  static __thread char bytes[LARGEST];
  unsigned first = 0, count = 0;
  double free_at = 0;
  prctl(PR_SET_TIMERSLACK, 1000);
  for (;;) {
    int64_t at = now();
    ssize_t length = read(way->from, bytes, sizeof bytes);
    if (length > 0) {
      if (count == QUEUE || chance(&way->chance) < loss) continue;
      struct packet *packet = malloc(sizeof *packet + (size_t)length);
      check(packet != NULL, "memory");
      free_at = (free_at > (double)at ? free_at : (double)at) + (double)length * ns_per_byte;
      packet->due = (int64_t)free_at + delay_ns;
      packet->length = (size_t)length;
      memcpy(packet->bytes, bytes, (size_t)length);
      queue[(first + count++) % QUEUE] = packet;
    }
    while (count > 0 && queue[first]->due <= at + SLACK_NS) {
      /* An interface that is down loses what comes. */
      (void)!write(way->to, queue[first]->bytes, queue[first]->length);
      free(queue[first]);
      first = (first + 1) % QUEUE;
      count--;
    }
    if (length <= 0) {
      struct pollfd readable = {.fd = way->from, .events = POLLIN};
      int64_t rest = count > 0 ? queue[first]->due - now() : 100000000;
      struct timespec wait = {.tv_nsec = rest > SLACK_NS ? (rest < 100000000 ? rest : 100000000) : SLACK_NS};
      ppoll(&readable, 1, &wait, NULL);
    }
  }
  return NULL;
}

/* An interface in that namespace, where the calling thread stays. */
static int tun(const char *namespace) {
  char path[256];
  snprintf(path, sizeof path, "/run/netns/%s", namespace);
  int there = open(path, O_RDONLY);
  check(there >= 0 && setns(there, CLONE_NEWNET) == 0, path);
  close(there);
  int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
  check(fd >= 0, "/dev/net/tun");
  struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
  strcpy(request.ifr_name, "eth0");
  check(ioctl(fd, TUNSETIFF, &request) == 0, "TUNSETIFF");
  return fd;
}

int main(int argc, char **argv) {
  if (argc != 6) {
    fprintf(stderr, "usage: %s NEAR FAR DELAY_US RATE_BIT_PER_S LOSS_PERCENT\n", argv[0]);
    return 2;
  }
  delay_ns = atoll(argv[3]) * 1000;
  ns_per_byte = 8e9 / atof(argv[4]);
  loss = atof(argv[5]) / 100;
  int near = tun(argv[1]), far = tun(argv[2]);
  struct direction there = {near, far, (uint64_t)now() | 1}, back = {far, near, (uint64_t)now() * 7919 | 1};
  pthread_t thread;
  check(pthread_create(&thread, NULL, carry, &back) == 0, "a thread");
  puts("up");
  fflush(stdout);
  carry(&there);
}
