/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* State that the programs of `ticks` keep for each CPU and culprit, and records that they send. */
#pragma once

#include "stacks.bpf.h"

enum {
	STACK_FRAMES = 64,
};

enum tick_limits {
	/* Maximum number of distinguished culprits: stacks and handlers. */
	MAX_CULPRITS = 4096,
};

/* What a late tick interrupted, from the registers. */
enum tick_found {
	FOUND_KERNEL,
	FOUND_IDLE,
	FOUND_USER,
};

/* What made a tick late, if known without its stack. */
enum tick_reason {
	REASON_NONE,
	/* The hypervisor ran instead of the vCPU. */
	REASON_STEAL,
	/* It did so then, or before the timer was due. */
	REASON_PERHAPS_STEAL,
	/* The handler of a device's interrupt: `id` is its number, `name` the handler's. */
	REASON_DEVICE_IRQ,
	/* `id` is an enum irq_vector. */
	REASON_VECTOR,
	/* A function of a hrtimer, which runs in the timer's interrupt: `id` is its address. */
	REASON_CALLBACK,
};

/* A handler of an interrupt that has run, or runs. */
struct handler {
	u64 id;
	/* enum tick_reason */
	u32 kind;
	u32 _unused;
	char name[16];
};

/* State of one CPU. Only programs on that CPU write it; user space takes counters out. */
struct tick {
	/* ID of the CPU's perf event, set by user space. */
	u64 event_id;
	/* Address of the event's timer, once known. */
	u64 timer;
	/* Address of the CPU's `hrtimer_bases`. */
	u64 timer_bases;
	/* When the timer is due next; 0: unknown. */
	u64 due_ns;
	/* Time to deliver an interrupt: seven of eight undelayed ticks are less late. */
	u64 delivery_ns;
	/* Last reading of the steal clock before the timer was due, and its time. */
	u64 steal_ns;
	u64 steal_read_ns;
	/* Whether it is exact, not as of the last switch or tick. */
	u64 is_steal_exact;
	/* Run time of handlers since the timer was due. */
	u64 handlers_ns;
	/* The longest of them. */
	u64 longest_ns;
	struct handler longest;
	/* Start of the current handler; 0: none. */
	u64 handler_since_ns;
	struct handler handler;
	/* The current hrtimer function in it, and the longest. */
	u64 callback_since_ns;
	u64 callback;
	u64 longest_callback_ns;
	u64 longest_callback;
	/* Minimum lateness of late events, set by user space. */
	u64 send_from_ns;
	/* Number of ticks. */
	u64 ticks;
	/* Number of ticks that were due and not seen. */
	u64 unseen;
	u64 lost_late_events;
	u64 lost_stacks;
	u64 lost_culprits;
	u64 lost_buckets;
	/* If all ticks are counted: periods missed, and in `lateness` how late each tick was. */
	u64 overruns;
	u64 _unused[6];
	struct distribution lateness;
};
_Static_assert(sizeof(struct tick) % 64 == 0, "two CPUs share a cache line");

struct culprit_key {
	u64 id;
	/* Hash of the stack; 0: none. */
	u64 stack;
	/* enum tick_found */
	u16 found;
	/* enum tick_reason */
	u16 reason;
	u32 _unused;
};

/* Interrupted stack, including the frames of the tracepoint and this program. */
struct interrupted_stack {
	/* Negative or 0: none. */
	s64 bytes;
	u64 frames[STACK_FRAMES];
};

struct culprit {
	/* ELEMENT_COUNTS, or as in elements.bpf.h. */
	u64 state;
	struct culprit_key key;
	/* Name of a device's handler. */
	char name[16];
	struct interrupted_stack stack;
	struct distribution length;
};

/* Stack taken inside a section by an NMI. Only that program writes it, once for each tick. */
struct inside {
	/* Due time of the tick; written last. */
	u64 due_ns;
	u64 at_ns;
	struct stack_taken stack;
	u64 _unused[5];
};
_Static_assert(sizeof(struct inside) % 64 == 0, "two CPUs share a cache line");

struct late_tick {
	u64 due_ns;
	/* When the interrupt came in; or when the timer's function was called, if it became due in that interrupt. */
	u64 came_ns;
	/* Time to deliver the interrupt, which follows. */
	u64 delivery_ns;
	/* Lower bound of the steal time; beyond it, time stolen either then or before the timer was due. */
	u64 steal_ns;
	u64 perhaps_stolen_ns;
	u64 handlers_ns;
	struct culprit_key key;
	char name[16];
	/* The interrupted thread. */
	u32 cpu;
	u32 tid;
	char comm[16];
	struct interrupted_stack stack;
	/* Left out if there is neither a stack nor a window. */
	struct stack_taken inside;
	/* Only with causes. */
	struct window window;
};
