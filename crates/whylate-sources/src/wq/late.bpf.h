/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The thread that queued an item, and the report of a late item. */
#pragma once

#include "context.bpf.h"

/* When the item that starts was queued, and activated. */
struct queueing {
	/* 0: its queueing was not seen. */
	u64 queued_ns;
	/* 0: max_active did not hold it back. */
	u64 activated_ns;
};

struct queuer {
	u64 pwq;
	u32 tid;
	u32 pid;
	/* ID of the kernel stack, negative without one. */
	s32 stack;
	char comm[16];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	/* User space sets it to ENTRIES if late events are wanted. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct queuer);
} queuer_by_entry SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} late_items SEC(".maps");

enum stack_limits {
	QUEUEING_STACK_BITS = 14,
	QUEUEING_STACKS = 1 << QUEUEING_STACK_BITS,
	/* A stack ID is its index in a map, and the generation above that. */
	STACK_GENERATION_BITS = 31 - QUEUEING_STACK_BITS,
	STACK_GENERATIONS = 1 << STACK_GENERATION_BITS,
};

/*
 * Selects the stack map that programs add to: the even or the odd one. If a stack finds no room, user space empties the
 * other map and starts the next generation there; IDs of the previous generation stay valid.
 */
u32 stack_generation = 0;

struct {
	__uint(type, BPF_MAP_TYPE_STACK_TRACE);
	/* User space sets it to QUEUEING_STACKS if stacks are wanted. */
	__uint(max_entries, 1);
	__uint(key_size, sizeof(u32));
	__uint(value_size, STACK_FRAMES * sizeof(u64));
} even_queueing_stacks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_STACK_TRACE);
	/* As above. */
	__uint(max_entries, 1);
	__uint(key_size, sizeof(u32));
	__uint(value_size, STACK_FRAMES * sizeof(u64));
} odd_queueing_stacks SEC(".maps");

/* ID of the current stack; -1 if there is no room. */
static __always_inline s32 keep_queueing_stack(void *ctx)
{
	u32 generation = *(volatile u32 *)&stack_generation;
	s32 place;

	if (generation & 1)
		place = bpf_get_stackid(ctx, &odd_queueing_stacks, 0);
	else
		place = bpf_get_stackid(ctx, &even_queueing_stacks, 0);
	if (place < 0) {
		lose(LOST_STACKS);
		return -1;
	}
	return (generation & (STACK_GENERATIONS - 1)) << QUEUEING_STACK_BITS | place;
}

/* A timer or a device queues the item, not the interrupted thread. */
static __always_inline void describe_interrupt(struct queuer *queuer, u32 interrupts)
{
	queuer->tid = 0;
	queuer->pid = 0;
	__builtin_memset(queuer->comm, 0, sizeof(queuer->comm));
	if (interrupts & IN_HARDIRQ)
		__builtin_memcpy(queuer->comm, "interrupt", sizeof("interrupt"));
	else
		__builtin_memcpy(queuer->comm, "softirq", sizeof("softirq"));
}

/* Records the queuer, in the context of `interrupts`. Of an item that was moved only the pwq, as it waits since it was first queued. */
static __always_inline void record_queuer(void *ctx, u32 entry, u64 pwq, u32 interrupts, bool was_moved)
{
	struct queuer *queuer = bpf_map_lookup_elem(&queuer_by_entry, &entry);
	struct task_struct *task = bpf_get_current_task_btf();

	if (!queuer)
		return;
	queuer->pwq = pwq;
	if (was_moved)
		return;
	if (interrupts) {
		describe_interrupt(queuer, interrupts);
	} else {
		queuer->tid = shown_number(task);
		queuer->pid = shown_process(task);
		bpf_get_current_comm(queuer->comm, sizeof(queuer->comm));
	}
	queuer->stack = keep_stacks ? keep_queueing_stack(ctx) : -1;
}

/* Fills in everything but the timestamps. */
static __always_inline void describe_late(struct late_item *late, u32 flags, const struct queuer *queuer, u64 handler)
{
	/* An item in progress keeps its pwq. */
	const struct pool_workqueue *pwq = (const struct pool_workqueue *)queuer->pwq;
	const struct workqueue_struct *workqueue = BPF_CORE_READ(pwq, wq);

	late->cpu = bpf_get_smp_processor_id();
	if (flags & ITEM_IS_BH) {
		/* The interrupted thread is not the worker. */
		late->worker_tid = 0;
		late->by_rescuer = false;
		__builtin_memcpy(late->worker_comm, "softirq", sizeof("softirq"));
	} else {
		late->worker_tid = shown_number(bpf_get_current_task_btf());
		late->by_rescuer = is_rescuer(bpf_get_current_task_btf());
		bpf_get_current_comm(late->worker_comm, sizeof(late->worker_comm));
	}
	late->tid = queuer->tid;
	late->pid = queuer->pid;
	late->stack = queuer->stack;
	__builtin_memcpy(late->comm, queuer->comm, sizeof(late->comm));
	write_symbol(late->handler, handler);
	bpf_core_read_str(late->workqueue, sizeof(late->workqueue), &workqueue->name);
}

static __noinline void report_late(const struct queued_item *queued, u32 entry, const struct queueing *queueing, u64 handler, u64 now_ns)
{
	const struct queuer *queuer = bpf_map_lookup_elem(&queuer_by_entry, &entry);
	struct late_item *late;

	if (!queuer)
		return;
	late = bpf_ringbuf_reserve(&late_items, sizeof(*late), 0);
	if (!late) {
		lose(LOST_LATE_EVENTS);
		return;
	}
	late->queued_ns = queueing->queued_ns;
	late->activated_ns = queueing->activated_ns;
	late->started_ns = now_ns;
	describe_late(late, queued->flags, queuer, handler);
	bpf_ringbuf_submit(late, 0);
}
