/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Settings by user space, data that it reads, and the reasons for which events are lost. */
#pragma once

enum series_key {
	BY_NOTHING,
	BY_HANDLER,
	BY_WORKQUEUE,
	BY_CPU,
	BY_POOL,
};

/* Events that could not be counted, by reason. */
enum lost_reason {
	/* An item started without a visible queueing, e.g. because it was queued before tracing started. */
	LOST_UNMATCHED,
	/* A queued item was cancelled, or rearmed with a delay: seen when the same memory is queued again. */
	LOST_CANCELLED,
	/* The item has another handler than when it was queued: the memory was freed and reused. */
	LOST_REUSED,
	/* No room for a queued item. */
	LOST_ITEMS_FULL,
	/* A queued item that did not start within EVICTABLE_NS was evicted for another one. */
	LOST_EVICTED,
	/* No room for a series. */
	LOST_SERIES_FULL,
	/* No room for a value in a histogram. */
	LOST_BUCKETS_FULL,
	/* An item ended without a visible start. */
	LOST_END_UNMATCHED,
	/* No room for a running item. */
	LOST_RUNNING_FULL,
	/* No room for a late event: the reader is too slow. */
	LOST_LATE_EVENTS,
	/* No room for the stack that queued an item. */
	LOST_STACKS,
	/* No room for an item in progress for which others may have to wait. */
	LOST_HOLDERS,
	LOST_REASONS,
};

enum {
	STACK_FRAMES = 64,
	SYMBOL_LENGTH = 128,
	WORKQUEUE_NAME_LENGTH = 32,
};

/* A latency over the threshold. */
struct late_item {
	u64 queued_ns;
	u64 activated_ns;
	u64 started_ns;
	u32 cpu;
	/* TIDs and PIDs in whylate's PID namespace. */
	u32 worker_tid;
	/* The queuer. */
	u32 tid;
	u32 pid;
	s32 stack;
	u32 by_rescuer;
	char comm[16];
	char worker_comm[16];
	char handler[SYMBOL_LENGTH];
	char workqueue[WORKQUEUE_NAME_LENGTH];
};

const volatile enum series_key series_key = BY_NOTHING;
const volatile bool measure_phases = false;
/* 0: no late events. */
const volatile u64 late_over_ns = 0;
/* 0: no late events with causes. */
const volatile u64 explain_over_ns = 0;
const volatile bool keep_stacks = false;
/* Selected handler, without its module. */
const volatile char wanted_handler[SYMBOL_LENGTH] = {};
const volatile bool has_wanted_handler = false;
/* Items start at the entry of process_one_work(), not at the later tracepoint. */
const volatile bool taken_under_lock = true;

/* Set by user space when everything is attached. */
bool enabled = false;

LOST_EVENTS(lost_reason, LOST_REASONS)

/* "function" or "function [module]". */
static __always_inline void write_symbol(char *name, u64 address)
{
	BPF_SNPRINTF(name, SYMBOL_LENGTH, "%ps", (void *)address);
}
