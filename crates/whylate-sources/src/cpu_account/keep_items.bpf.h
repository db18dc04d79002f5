/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Queuers of work items, until a worker starts them. Costs some 100 ns per item. */
#pragma once

#include "keep_edges.bpf.h"

struct queued_item {
	/* Address of the item; 0 if none. */
	u64 work;
	struct entry entry;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	/* User space makes it ITEMS long where edges are kept. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct queued_item);
} queued_by_work SEC(".maps");

static __always_inline struct queued_item *queued_of(const struct work_struct *work)
{
	u32 index = hash_of(low_half((u64)work), ITEM_BITS);

	return bpf_map_lookup_elem(&queued_by_work, &index);
}

enum {
	/* Stands for an item's address while the entry is written. */
	IS_WRITTEN = 1,
};

/*
 * Barrier items of a flush are queued without this event. An item may be queued again between its start and its execute_start event: that
 * run then gets the later queuer, and the next run gets none.
 */
SEC("?tp_btf/workqueue_queue_work")
int BPF_PROG(on_workqueue_queue_work, int requested_cpu, struct pool_workqueue *pwq, struct work_struct *work)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct account *account = account_of(cpu);
	struct queued_item *queued = queued_of(work);
	struct entry entry = { .woken_ns = bpf_ktime_get_ns(), .waker_cpu = cpu };
	u64 before;

	if (!account || !queued)
		return 0;
	entry.kind = kind_here(account);
	if (entry.kind == ENTRY_THREAD)
		entry.waker = account->softirq ? net_raiser_here(account) : shown_number(bpf_get_current_task_btf());
	if (entry.kind == ENTRY_TIMER)
		entry.waker = timer_here(account);
	if (entry.kind == ENTRY_UNSEEN)
		count_unseen_interrupt(account);
	if (entry.kind == ENTRY_DISK)
		entry.waker = account->completed[is_in_irq(account)] - 1;
	entry.kind |= ENTRY_OF_ITEM;
	before = queued->work;
	if (before && before != (u64)work)
		account->queuers_overwritten++;
	/* Another CPU may take the entry, or write another item with the same hash. */
	if (before == IS_WRITTEN || __sync_val_compare_and_swap(&queued->work, before, IS_WRITTEN) != before)
		return 0;
	queued->entry = entry;
	__sync_val_compare_and_swap(&queued->work, IS_WRITTEN, (u64)work);
	return 0;
}

/* Takes the queuer of an item that starts, if it was seen. */
static __always_inline void take_queuer(struct entry *to, const struct work_struct *work)
{
	struct queued_item *queued = queued_of(work);

	if (!queued || queued->work != (u64)work)
		return;
	*to = queued->entry;
	/* Another item took over the entry, or this one is queued again. */
	if (__sync_val_compare_and_swap(&queued->work, (u64)work, 0) != (u64)work || to->woken_ns != queued->entry.woken_ns)
		__builtin_memset(to, 0, sizeof(*to));
	/* A program was preempted, or an interrupt was not seen: the queuer is unknown. */
	if (to->kind == (ENTRY_UNSEEN | ENTRY_OF_ITEM))
		to->kind = 0;
}
