/*
 * What the injectors of faults have in common (faulty_calls.c, faulty_verbs.c): calls with the kinds of fault that they may
 * meet, chance by a seed, and the counts.
 */
#ifndef INJECTION_H
#define INJECTION_H

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Kinds of fault per call. */
#define KINDS 8
/* In place of an errno: fewer bytes, or fewer events, than there could be. */
#define SHORT (-1)
/* The call does what it shall, and its thread loses the processor before it can look at the result. */
#define LATE (-2)

/* A call: what it may fail with, how often it was made, and how often it failed in each way. */
struct target {
  const char *name;
  int kinds[KINDS];
  atomic_uint calls, turn, injected[KINDS];
};

static uint64_t seed = 1;

static uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

/* What falls to the call of that number and kind. */
static uint64_t chance(unsigned call, unsigned number) {
  return mix(mix(seed + call) + number * 0x9e3779b97f4a7c15u);
}

/* The fault that it meets now. The kinds take turns, so that each one comes. */
static int next_fault(struct target *target) {
  unsigned kinds = 0;
  while (kinds < KINDS && target->kinds[kinds]) kinds++;
  unsigned kind = atomic_fetch_add(&target->turn, 1) % kinds;
  atomic_fetch_add(&target->injected[kind], 1);
  return target->kinds[kind];
}

static const char *name_of(int fault) {
  return fault == SHORT ? "short" : fault == LATE ? "late" : strerrorname_np(fault);
}

/*
 * Adds a line for each kind to the text, which is `at` long: name, kind, calls made, faults injected. Returns how long it
 * is then, or -1 when there is no room.
 */
static int report(const struct target *target, char *text, int at, int room) {
  for (int kind = 0; at >= 0 && kind < KINDS && target->kinds[kind]; kind++) {
    int error = target->kinds[kind];
    int wrote = snprintf(text + at, (size_t)(room - at), "%s %s %u %u\n", target->name,
                         name_of(error), atomic_load(&target->calls),
                         atomic_load(&target->injected[kind]));
    at = wrote < 0 || wrote >= room - at ? -1 : at + wrote;
  }
  return at;
}

#endif
