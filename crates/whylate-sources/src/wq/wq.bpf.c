// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Latency and run time of work items: queued -> activated (max_active) -> taken by a worker -> ends.
 *
 * "Taken" is the entry of process_one_work(), under the pool's lock and before PENDING is cleared: only there the item
 * cannot have been queued again. If that function cannot be attached to, workqueue_execute_start replaces it.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "compat.bpf.h"
#include "lost.bpf.h"
#include "pid_namespace.bpf.h"
#include "ways.bpf.h"
#include "distribution.bpf.h"
#include "settings.bpf.h"
#include "series.bpf.h"
#include "items.bpf.h"
#include "late.bpf.h"
#include "running.bpf.h"
#include "wakeups.bpf.h"
#include "window.bpf.h"
#include "explain.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Always empty: puts the types that user space shares into the skeleton. */
struct {
	struct late_item late_item;
	struct explained_item explained_item;
	enum explain_limits explain_limits;
	enum pool_class pool_class;
	enum lost_reason lost_reason;
	enum item_limits item_limits;
	enum series_limits series_limits;
	enum stack_limits stack_limits;
	enum distribution_kind distribution_kind;
	enum series_use series_use;
	enum key_mark key_mark;
} layouts = {};

/* Return addresses inside mod_delayed_work_on(), as they are found. */
u64 mod_delayed_calls[4] = {};
/* Address of wq_barrier_func(), once it is found. */
u64 barrier_handler = 0;

/* Whether "function" or "function [module]" is the selected function. */
static __noinline bool is_wanted(const char *name)
{
	for (u32 i = 0; i < SYMBOL_LENGTH; i++) {
		char wanted = wanted_handler[i], is = name[i];

		if (!wanted)
			return !is || is == ' ';
		if (wanted != is)
			return false;
	}
	return false;
}

/* Creates the series of a new key. */
static __always_inline u32 new_series(u64 handler, u64 place, struct pool_workqueue *pwq)
{
	u32 id = claim_series(handler, place);
	struct series *series = bpf_map_lookup_elem(&series_by_id, &id);
	u32 use = SERIES_COUNTS;

	if (!series) {
		lose(LOST_SERIES_FULL);
		return SERIES_NONE;
	}
	if (handler != KEY_NO_HANDLER)
		write_symbol(series->handler, handler);
	if (place == KEY_IS_FILTER)
		use = is_wanted(series->handler) ? SERIES_IS_WANTED : SERIES_IS_UNWANTED;
	if (pwq) {
		struct worker_pool *pool = pwq->pool;

		bpf_core_read_str(series->workqueue, sizeof(series->workqueue), &pwq->wq->name);
		series->pool_id = pool->id;
		series->pool_cpu = pool->cpu;
		series->pool_nice = pool->attrs->nice;
		series->pool_is_bh = pool_is_bh(pool);
	}
	series->cpu = bpf_get_smp_processor_id();
	series->use = use;
	publish_series(id, handler);
	return id;
}

static __always_inline u32 series_of(u64 handler, u64 place, struct pool_workqueue *pwq)
{
	u32 id = known_series(handler, place);

	if (id == SERIES_NONE)
		id = search_series(handler, place);
	if (id == SERIES_NONE)
		id = new_series(handler, place, pwq);
	return id;
}

/* False if another handler is selected. */
static __always_inline bool handler_is_wanted(u64 handler)
{
	u32 id = series_of(handler, KEY_IS_FILTER, NULL);
	struct series *series = bpf_map_lookup_elem(&series_by_id, &id);

	/* Without room for the answer the handler counts as unwanted, which LOST_SERIES_FULL shows. */
	return series && series->use == SERIES_IS_WANTED;
}

/* Another workqueue may have the address of a destroyed one. */
static __noinline bool is_same_workqueue(struct series *series, const void *name)
{
	char now[WORKQUEUE_NAME_LENGTH] = {};

	bpf_probe_read_kernel_str(now, sizeof(now), name);
	for (u32 i = 0; i < WORKQUEUE_NAME_LENGTH; i++) {
		if (now[i] != series->workqueue[i])
			return false;
		if (!now[i])
			break;
	}
	return true;
}

static __always_inline u32 series_of_workqueue(u64 handler, struct pool_workqueue *pwq, u64 now_ns)
{
	u64 workqueue = (u64)pwq->wq;
	u32 id = series_of(handler, workqueue, pwq);
	struct series *series = bpf_map_lookup_elem(&series_by_id, &id);

	if (!series || now_ns - series->checked_ns < WORKQUEUE_CHECK_NS)
		return id;
	series->checked_ns = now_ns;
	if (is_same_workqueue(series, &pwq->wq->name))
		return id;
	retire_series(id);
	return series_of(handler, workqueue, pwq);
}

static __always_inline u32 series_of_queued(struct pool_workqueue *pwq, u64 handler, u64 now_ns)
{
	switch (series_key) {
	case BY_HANDLER:
		return series_of_workqueue(handler, pwq, now_ns);
	case BY_WORKQUEUE:
		return series_of_workqueue(KEY_NO_HANDLER, pwq, now_ns);
	case BY_POOL:
		return series_of(KEY_NO_HANDLER, KEY_FIRST_NUMBER + (u64)pwq->pool->id, pwq);
	default:
		/* Known when it starts. */
		return 0;
	}
}

static __always_inline void count(struct series *series, enum distribution_kind kind, u64 value_ns)
{
	/* Without a key, each CPU has one writer: a kind has one program, and the kernel skips (and counts) nested runs. */
	if (!distribution_add(&series->distributions[kind], value_ns, series_key != BY_NOTHING))
		lose(LOST_BUCKETS_FULL);
}

static __always_inline void count_rare(struct series *series, enum distribution_kind kind, u64 value_ns)
{
	if (!distribution_add_rare(&series->distributions[kind], value_ns))
		lose(LOST_BUCKETS_FULL);
}

/*
 * mod_delayed_work(.., 0) dequeues a queued item and queues it again at once: it has been waiting since the first time.
 * Only the call stack shows that, no event does. This runs only for items that are queued twice.
 */
static __noinline bool is_mod_delayed(void *ctx)
{
	u64 stack[12] = {};
	long bytes = bpf_get_stack(ctx, stack, sizeof(stack), 0);

	for (u32 frame = 0; frame < 12; frame++) {
		char name[SYMBOL_LENGTH];
		u64 address = stack[frame];

		if (!address || (long)(frame * sizeof(u64)) >= bytes)
			return false;
#pragma unroll
		for (u32 known = 0; known < 4; known++) {
			if (mod_delayed_calls[known] == address)
				return true;
		}
		write_symbol(name, address);
		if (bpf_strncmp(name, sizeof("mod_delayed_work_on"), "mod_delayed_work_on") == 0) {
#pragma unroll
			for (u32 known = 0; known < 4; known++) {
				if (__sync_val_compare_and_swap(&mod_delayed_calls[known], 0, address) == 0)
					break;
			}
			return true;
		}
	}
	return false;
}

/* Flush barriers are inserted into a worklist without a queue event. */
static __noinline bool is_barrier(u64 handler)
{
	char name[SYMBOL_LENGTH];

	if (barrier_handler)
		return handler == barrier_handler;
	write_symbol(name, handler);
	if (bpf_strncmp(name, sizeof("wq_barrier_func"), "wq_barrier_func") != 0)
		return false;
	barrier_handler = handler;
	return true;
}

/* Under the pool's lock the item does not change. */
static __always_inline void take_under_lock(struct queued_item *queued, u32 entry, u64 item, u64 stamp, struct queueing *queueing)
{
	struct item_history *history;

	queueing->queued_ns = stamp & ~STAMP_HAS_EARLIER;
	if (stamp & STAMP_HAS_EARLIER) {
		history = bpf_map_lookup_elem(&history_by_entry, &entry);
		if (history && history->moved)
			queueing->queued_ns = history->earlier_ns;
	}
	take_item(queued, entry, item, stamp);
}

/*
 * At the tracepoint the item may have been queued again since its worker took it. Then it is pending, the run that
 * starts is that of the earlier queueing, and the later one stays. The queue event comes after the PENDING bit, possibly
 * during this function: compare-and-exchange detects it. An earlier queueing of a non-pending item was cancelled, or moved.
 */
static __always_inline void take_at_tracepoint(struct queued_item *queued, u32 entry, u64 item, u64 stamp, struct work_struct *work,
					       struct queueing *queueing)
{
	struct item_history *history = NULL;

	queueing->queued_ns = stamp & ~STAMP_HAS_EARLIER;
	if (stamp & STAMP_HAS_EARLIER)
		history = bpf_map_lookup_elem(&history_by_entry, &entry);
	if (history && work_is_pending(work)) {
		queueing->queued_ns = history->earlier_ns;
		queueing->activated_ns = 0;
		__sync_val_compare_and_swap(&queued->stamp, stamp, stamp & ~STAMP_HAS_EARLIER);
		return;
	}
	if (history && history->moved)
		queueing->queued_ns = history->earlier_ns;
	else if (history)
		lose(LOST_CANCELLED);
	if (take_item(queued, entry, item, stamp))
		return;
	/* Queued again concurrently: its history holds this run. */
	stamp = queued->stamp;
	__sync_val_compare_and_swap(&queued->stamp, stamp, stamp & ~STAMP_HAS_EARLIER);
}

static __always_inline void count_start(u32 id, const struct queueing *queueing, u64 now_ns)
{
	struct series *series = bpf_map_lookup_elem(&series_by_id, &id);

	if (!series) {
		lose(LOST_SERIES_FULL);
		return;
	}
	if (!measure_phases || !queueing->activated_ns) {
		count(series, LATENCY_OF_IMMEDIATE, since(now_ns, queueing->queued_ns));
	} else {
		count_rare(series, LATENCY_OF_DEFERRED, since(now_ns, queueing->queued_ns));
		count_rare(series, ACTIVATE_OF_DEFERRED, since(queueing->activated_ns, queueing->queued_ns));
		count_rare(series, POOL_OF_DEFERRED, since(now_ns, queueing->activated_ns));
	}
}

/* Start of an item with a known queueing. Returns its series. */
static __always_inline u32 known_item_starts(struct queued_item *queued, u32 entry, u64 stamp, struct work_struct *work, u64 now_ns)
{
	struct queueing queueing = {};
	struct item_history *history;
	u64 handler = (u64)work->func;
	u32 id = queued->series;

	if (measure_phases && queued->flags & ITEM_WAS_DEFERRED) {
		history = bpf_map_lookup_elem(&history_by_entry, &entry);
		if (history)
			queueing.activated_ns = history->activated_ns;
	}
	if (taken_under_lock)
		take_under_lock(queued, entry, (u64)work, stamp, &queueing);
	else
		take_at_tracepoint(queued, entry, (u64)work, stamp, work, &queueing);
	if (queueing.activated_ns && (queueing.activated_ns < queueing.queued_ns || queueing.activated_ns > now_ns))
		queueing.activated_ns = 0;
	if (series_key == BY_NOTHING)
		id = bpf_get_smp_processor_id();
	if (series_key == BY_CPU)
		id = series_of(KEY_NO_HANDLER, KEY_FIRST_NUMBER + (u64)bpf_get_smp_processor_id(), NULL);
	if (explain_over_ns && since(now_ns, queueing.queued_ns) >= explain_over_ns) {
		struct late_start start = {
			.handler = handler,
			.queueing = queueing,
			.started_ns = now_ns,
			.entry = entry,
			.flags = queued->flags,
		};

		explain_late(&start);
	} else if (late_over_ns && since(now_ns, queueing.queued_ns) >= late_over_ns) {
		report_late(queued, entry, &queueing, handler, now_ns);
	}
	count_start(id, &queueing, now_ns);
	return id;
}

/* A worker takes an item. `task` is NULL for a worker in a softirq. */
static __always_inline int item_starts(struct work_struct *work, struct task_struct *task)
{
	u64 item = (u64)work;
	u64 handler = (u64)work->func;
	struct home home = home_of(item);
	u32 entry = NO_ENTRY;
	struct queued_item *queued = find_item(&home, item, &entry);
	u64 stamp = queued ? queued->stamp : 0;
	/* Read after the stamp, so that it is not earlier. */
	u64 now_ns = bpf_ktime_get_ns();
	bool is_bh = !task;
	u32 id = SERIES_NONE;

	if (!queued || stamp <= STAMP_BUSY || queued->item != item) {
		if ((!has_wanted_handler || handler_is_wanted(handler)) && !is_barrier(handler))
			lose(LOST_UNMATCHED);
		/* At the tracepoint a softirq looks like the worker that it interrupts; but that one has its item already. */
		is_bh |= measure_phases && running_item_of((u64)task);
	} else if (queued->handler != low_half(handler)) {
		lose(LOST_REUSED);
		take_item(queued, entry, item, stamp);
	} else {
		is_bh |= queued->flags & ITEM_IS_BH;
		id = known_item_starts(queued, entry, stamp, work, now_ns);
	}
	if (explain_over_ns)
		item_took_slot(is_bh ? bh_worker() : (u64)task, work, pwq_of_started(work, is_bh ? NULL : task), now_ns);
	if (measure_phases)
		item_runs(is_bh ? bh_worker() : (u64)task, item, id, now_ns);
	return 0;
}

/* The first program, as programs are loaded in this order: one that a kernel may reject must fail first. */
SEC("?fentry/process_one_work")
int BPF_PROG(on_process_one_work, struct worker *worker, struct work_struct *work)
{
	if (!enabled)
		return 0;
	/* The worker is only needed at the item's end. */
	if (!measure_phases || worker_is_bh(worker))
		return item_starts(work, NULL);
	return item_starts(work, bpf_get_current_task_btf());
}

/* Replaces on_process_one_work() if that cannot be attached. */
SEC("?tp_btf/workqueue_execute_start")
int BPF_PROG(on_workqueue_execute_start, struct work_struct *work)
{
	struct task_struct *task;

	if (!enabled)
		return 0;
	if (!measure_phases)
		return item_starts(work, NULL);
	task = bpf_get_current_task_btf();
	return item_starts(work, task->flags & PF_WQ_WORKER ? task : NULL);
}

/* Only the item's address is valid: its memory may be freed. (The verifier rejects the handler, a code pointer.) */
SEC("tp_btf/workqueue_execute_end")
int BPF_PROG(on_workqueue_execute_end, struct work_struct *work)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct running_item *running;
	struct series *series;
	struct run run;
	u32 id;

	if (!enabled)
		return 0;
	if (explain_over_ns && !item_released_slot((u64)task, (u64)work))
		item_released_slot(bh_worker(), (u64)work);
	running = running_item_of((u64)task);
	if (!running || running->item != (u64)work)
		running = running_item_of(bh_worker());
	if (!running || running->item != (u64)work) {
		lose(LOST_END_UNMATCHED);
		return 0;
	}
	id = running->series;
	series = bpf_map_lookup_elem(&series_by_id, &id);
	if (series && running->switches == switches_of(task)) {
		count(series, RUNTIME_OF_STEADY, since(bpf_ktime_get_ns(), running->started_ns));
	} else if (series) {
		run = run_of(running, task);
		count_rare(series, RUNTIME_OF_SWITCHED, run.runtime_ns);
		count_rare(series, ON_CPU_OF_SWITCHED, run.on_cpu_ns);
		count_rare(series, ASLEEP_OF_SWITCHED, run.blocked_ns);
		count_rare(series, READY_OF_SWITCHED, run.ready_ns);
	}
	running->item = 0;
	return 0;
}

/* Entry of the item being queued, and its state. */
struct placing {
	u32 entry;
	bool is_stamped;
	bool keeps_queuer;
};

/*
 * An item is queued without a visible start since it was last queued: mod_delayed_work() moved it; or it was cancelled;
 * or, if starts are seen at the tracepoint, its worker has taken it and not reached the tracepoint yet. The start
 * distinguishes them. False if the start came concurrently, and took the entry.
 */
static __noinline bool queued_twice(void *ctx, struct queued_item *queued, u64 stamp, u64 now_ns, struct placing *placing)
{
	u32 entry = placing->entry;
	struct item_history *history = bpf_map_lookup_elem(&history_by_entry, &entry);
	u64 earlier_ns = stamp & ~STAMP_HAS_EARLIER;
	bool moved;

	if (!history)
		return false;
	moved = is_mod_delayed(ctx);
	if (moved && earlier_ns + MOVE_WITHIN_NS < now_ns && !(queued->flags & ITEM_WAS_DEFERRED)) {
		/* It may have been cancelled long ago, which cannot be distinguished: do not report it as late. */
		moved = false;
	}
	if (stamp & STAMP_HAS_EARLIER) {
		if (moved && history->moved)
			earlier_ns = history->earlier_ns;
		else
			lose(LOST_CANCELLED);
	}
	history->earlier_ns = earlier_ns;
	history->moved = moved;
	placing->is_stamped = true;
	placing->keeps_queuer = moved;
	if (taken_under_lock && !moved) {
		lose(LOST_CANCELLED);
		queued->stamp = now_ns;
		return true;
	}
	return __sync_val_compare_and_swap(&queued->stamp, stamp, now_ns | STAMP_HAS_EARLIER) == stamp;
}

/* Entry of an item that is being queued, for writing. */
static __always_inline struct queued_item *entry_for(void *ctx, const struct home *home, u64 item, u32 handler, u64 now_ns,
						     struct placing *placing)
{
	struct queued_item *queued = find_item(home, item, &placing->entry);
	u64 stamp;

	if (!queued)
		return claim_item(home, item, now_ns, &placing->entry);
	stamp = queued->stamp;
	/*
	 * Idle since its last start, so nothing else writes it but an item without room that claims it concurrently: then
	 * one of the two is counted as unmatched, and the stamp fits both.
	 */
	if (!stamp)
		return queued;
	/* Read after the stamp: another item may have claimed an idle entry. */
	if (stamp > STAMP_BUSY && queued->item == item) {
		if (queued->handler != handler) {
			/* The memory was freed with the item queued, so that item was cancelled. */
			lose(LOST_CANCELLED);
			if (__sync_val_compare_and_swap(&queued->stamp, stamp, STAMP_BUSY) == stamp)
				return queued;
		} else if (queued_twice(ctx, queued, stamp, now_ns, placing)) {
			return queued;
		}
	}
	placing->is_stamped = false;
	return claim_item(home, item, now_ns, &placing->entry);
}

SEC("tp_btf/workqueue_queue_work")
int BPF_PROG(on_workqueue_queue_work, int req_cpu, struct pool_workqueue *pwq, struct work_struct *work)
{
	u64 item = (u64)work;
	struct queued_item *queued;
	struct home home;
	struct placing placing = { .entry = NO_ENTRY };
	u32 series, interrupts = 0;
	u64 handler, now_ns;
	bool is_bh;

	if (!enabled)
		return 0;
	/* Read before branches: see untrusted(). */
	if (late_over_ns || explain_over_ns)
		interrupts = interrupts_here(bpf_get_current_task_btf());
	is_bh = measure_phases && pool_is_bh(pwq->pool);
	handler = (u64)work->func;
	if (has_wanted_handler && !handler_is_wanted(handler))
		return 0;
	now_ns = bpf_ktime_get_ns() & ~(u64)STAMP_HAS_EARLIER;
	series = series_of_queued(pwq, handler, now_ns);
	home = home_of(item);
	if (series == SERIES_NONE)
		return 0;
	queued = entry_for(ctx, &home, item, low_half(handler), now_ns, &placing);
	if (!queued)
		return 0;
	queued->handler = low_half(handler);
	queued->series = series;
	queued->flags = is_bh ? ITEM_IS_BH : 0;
	if (late_over_ns || explain_over_ns)
		record_queuer(ctx, placing.entry, (u64)pwq, interrupts, placing.is_stamped && placing.keeps_queuer);
	barrier();
	if (!placing.is_stamped)
		queued->stamp = now_ns;
	return 0;
}

SEC("tp_btf/workqueue_activate_work")
int BPF_PROG(on_workqueue_activate_work, struct work_struct *work)
{
	u64 item = (u64)work;
	struct item_history *history;
	struct queued_item *queued;
	struct home home;
	u32 entry;

	/* Nearly every item is activated when it is queued, and is not marked inactive. */
	if (!work_is_inactive(work) || !enabled)
		return 0;
	home = home_of(item);
	queued = find_item(&home, item, &entry);
	history = queued ? bpf_map_lookup_elem(&history_by_entry, &entry) : NULL;
	if (!history || queued->stamp <= STAMP_BUSY)
		return 0;
	history->activated_ns = bpf_ktime_get_ns();
	queued->flags |= ITEM_WAS_DEFERRED;
	return 0;
}
