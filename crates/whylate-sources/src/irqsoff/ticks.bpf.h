/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the programs of `ticks` keep of each CPU and of each culprit, and send to user space. */
#pragma once

#include "stacks.bpf.h"

enum {
	STACK_FRAMES = 64,
};

enum tick_limits {
	/* Culprits that are told apart: stacks, handlers. */
	MAX_CULPRITS = 4096,
};

/* What a late tick interrupted, as the registers tell. */
enum tick_found {
	FOUND_KERNEL,
	FOUND_IDLE,
	FOUND_USER,
};

/* What made it late, where that is known without a look at the stack. */
enum tick_reason {
	REASON_NONE,
	/* The hypervisor had the CPU. */
	REASON_STEAL,
	/* It had it then, or before the timer was due. */
	REASON_PERHAPS_STEAL,
	/* The handler of a device's interrupt: `id` is its number, `name` the handler's. */
	REASON_DEVICE_IRQ,
	/* `id` is an enum irq_vector. */
	REASON_VECTOR,
	/* A function of a hrtimer, which runs in the timer's interrupt: `id` is its address. */
	REASON_CALLBACK,
};

/* An interrupt's handler that has run, or runs. */
struct handler {
	u64 id;
	/* enum tick_reason */
	u32 kind;
	u32 _unused;
	char name[16];
};

/* The state of one CPU. Only programs on that CPU write it, but for what user space takes out. */
struct tick {
	/* The kernel's number of the CPU's event, which user space tells. */
	u64 event_id;
	/* Address of its timer, once that is known. */
	u64 timer;
	/* And of the CPU's `hrtimer_bases`. */
	u64 timer_bases;
	/* When the timer is due next; 0: not known. */
	u64 due_ns;
	/* What delivering an interrupt takes: of ticks that nothing delayed, seven of eight are less late. */
	u64 delivery_ns;
	/* The steal clock, and when it was read: the last time before the timer was due. */
	u64 steal_ns;
	u64 steal_read_ns;
	/* It is right at any time, and not as of the last switch or tick. */
	u64 is_steal_exact;
	/* How long handlers have run since the timer was due. */
	u64 handlers_ns;
	/* The longest of them. */
	u64 longest_ns;
	struct handler longest;
	/* The handler that runs; 0: none. */
	u64 handler_since_ns;
	struct handler handler;
	/* The longest function of a hrtimer in it, and the one that runs. */
	u64 callback_since_ns;
	u64 callback;
	u64 longest_callback_ns;
	u64 longest_callback;
	/* From which lateness on a late event is sent; user space changes it. */
	u64 send_from_ns;
	/* How often the timer came in. */
	u64 ticks;
	/* How often it must have without being seen. */
	u64 unseen;
	u64 lost_late_events;
	u64 lost_stacks;
	u64 lost_culprits;
	u64 lost_buckets;
	/* Of all ticks, where they are to be counted: periods that were over when one came in, and how late they were. */
	u64 overruns;
	u64 _unused[6];
	struct distribution lateness;
};
_Static_assert(sizeof(struct tick) % 64 == 0, "two CPUs share a cache line");

struct culprit_key {
	u64 id;
	/* A hash of the stack; 0: it has none. */
	u64 stack;
	/* enum tick_found */
	u16 found;
	/* enum tick_reason */
	u16 reason;
	u32 _unused;
};

/* What the timer's interrupt found, with the frames of the tracepoint and of its program. */
struct interrupted_stack {
	/* Negative or 0: none. */
	s64 bytes;
	u64 frames[STACK_FRAMES];
};

struct culprit {
	/* ELEMENT_COUNTS, or as in elements.bpf.h. */
	u64 state;
	struct culprit_key key;
	/* Of a device's handler. */
	char name[16];
	struct interrupted_stack stack;
	struct distribution length;
};

/* The stack inside a section, taken at an NMI. Only the program there writes it, once for each tick. */
struct inside {
	/* Of which tick; written last. */
	u64 due_ns;
	u64 at_ns;
	struct stack_taken stack;
	u64 _unused[5];
};
_Static_assert(sizeof(struct inside) % 64 == 0, "two CPUs share a cache line");

struct late_tick {
	u64 due_ns;
	/* When the interrupt was let in; or the timer's function was called, where it became due in that interrupt. */
	u64 came_ns;
	/* What delivering an interrupt takes, which comes after that. */
	u64 delivery_ns;
	/* At least, and what was stolen beyond that: then, or before the timer was due. */
	u64 steal_ns;
	u64 perhaps_stolen_ns;
	u64 handlers_ns;
	struct culprit_key key;
	char name[16];
	/* Who had the CPU. */
	u32 cpu;
	u32 tid;
	char comm[16];
	struct interrupted_stack stack;
	/* Left out without one where there is no window. */
	struct stack_taken inside;
	/* With causes only. */
	struct window window;
};
