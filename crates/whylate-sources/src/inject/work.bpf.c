// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Known work items, without a kernel module: every bpf_wq is one work item with the kernel's handler bpf_wq_work(). User space runs
 * `prepare` until enough items are allocated, then `queue_items` until all are queued. Once `stopping` is set, no more items are queued and
 * pending ones end at once.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include "busy.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

extern int bpf_wq_init(struct bpf_wq *wq, void *map, unsigned int flags) __ksym;
extern int bpf_wq_set_callback_impl(struct bpf_wq *wq, int (*callback)(void *map, int *key, void *value),
				    unsigned int flags, void *aux) __ksym;
extern int bpf_wq_start(struct bpf_wq *wq, unsigned int flags) __ksym;

/* Number of executions. */
const volatile u64 items_wanted = 1;
/* How long each item keeps its worker's CPU busy. */
const volatile u64 busy_ns = 0;

/* Counters and times so far. All times are of CLOCK_MONOTONIC. */
struct account {
	/* Number of slots of items_by_slot that hold an allocated item, from slot 0 on. */
	u64 allocated;
	u64 queued;
	u64 started;
	u64 executed;
	/* Maximum number of items that were queued and not started, as seen at the end of each batch. */
	u64 at_once;
	/* Sum of the times from the queueing of each item to the start of its handler. */
	u64 wait_total_ns;
	u64 busy_total_ns;
	u64 busy_max_ns;
	/* Read before the first item is queued, so no item is queued earlier. */
	u64 first_queue_ns;
	/* Read after the last item of a batch is queued, so no item is queued later. */
	u64 last_queue_ns;
	u64 first_start_ns;
	u64 last_end_ns;
};

struct account account = {};

struct item {
	struct bpf_wq wq;
	u64 queued_ns;
	/* Queued and not started. bpf_wq_start() on a pending item is silently dropped by the kernel. */
	u32 pending;
};

/* User space sets the size. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct item);
} items_by_slot SEC(".maps");

enum {
	/* The limit of bpf_loop(). */
	MAX_ROUNDS = 1 << 23,
	/* Few items end concurrently on several workers of one CPU. */
	RAISE_TRIES = 16,
};

static void raise_to(u64 *maximum, u64 value)
{
	for (int i = 0; i < RAISE_TRIES; i++) {
		u64 old = *(volatile u64 *)maximum;

		if (old >= value || __sync_val_compare_and_swap(maximum, old, value) == old)
			return;
	}
}

static int run_item(void *map, int *key, void *value)
{
	struct item *item = value;
	u64 start_ns = bpf_ktime_get_ns();
	u64 end_ns;

	__sync_fetch_and_add(&account.wait_total_ns, start_ns - item->queued_ns);
	/* The kernel clears its own pending bit before it calls a handler: from here on the item can be queued again. */
	item->pending = 0;
	__sync_fetch_and_add(&account.started, 1);
	__sync_val_compare_and_swap(&account.first_start_ns, 0, start_ns);
	end_ns = busy_ns ? keep_busy(start_ns, busy_ns) : bpf_ktime_get_ns();
	__sync_fetch_and_add(&account.busy_total_ns, end_ns - start_ns);
	raise_to(&account.busy_max_ns, end_ns - start_ns);
	raise_to(&account.last_end_ns, end_ns);
	__sync_fetch_and_add(&account.executed, 1);
	return 0;
}

static long allocate_item(u32 round, u32 *slot)
{
	struct item *item = bpf_map_lookup_elem(&items_by_slot, slot);

	if (!item || bpf_wq_init(&item->wq, &items_by_slot, 0))
		return 1;
	if (bpf_wq_set_callback_impl(&item->wq, run_item, 0, NULL))
		return 1;
	(*slot)++;
	return 0;
}

/* Allocates items until the map is full or the kernel has no memory for now. */
SEC("syscall")
int prepare(void *context)
{
	u32 slot = account.allocated;

	bpf_loop(MAX_ROUNDS, allocate_item, &slot, 0);
	account.allocated = slot;
	return 0;
}

static long queue_item(u32 slot, void *context)
{
	struct item *item;

	if (account.queued >= items_wanted || stopping)
		return 1;
	item = bpf_map_lookup_elem(&items_by_slot, &slot);
	if (!item)
		return 1;
	if (item->pending)
		return 0;
	item->pending = 1;
	item->queued_ns = bpf_ktime_get_ns();
	if (bpf_wq_start(&item->wq, 0)) {
		item->pending = 0;
		return 1;
	}
	account.queued++;
	return 0;
}

/* Queues items that are not pending on the caller's CPU, until `items_wanted` are queued. */
SEC("syscall")
int queue_items(void *context)
{
	u64 queued_before = account.queued;
	u64 before_ns = bpf_ktime_get_ns();
	u64 pending;

	bpf_loop(account.allocated, queue_item, NULL, 0);
	if (account.queued == queued_before)
		return 0;
	if (!queued_before)
		account.first_queue_ns = before_ns;
	account.last_queue_ns = bpf_ktime_get_ns();
	pending = account.queued - *(volatile u64 *)&account.started;
	if (pending > account.at_once)
		account.at_once = pending;
	return 0;
}
