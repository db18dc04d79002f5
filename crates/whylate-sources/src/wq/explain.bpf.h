/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Evidence for the causes of a late item's latency: copied at its start, because it is overwritten soon after. */
#pragma once

enum explain_limits {
	/* Number of items kept for each workqueue and CPU (or node). */
	HELD_SLOTS = 32,
	/* Maximum number of items in progress that are skipped to find room for another one. */
	HELD_SLOT_PROBES = 4,
	HELD_SLOT_RINGS_BITS = 11,
	HELD_SLOT_RINGS = 1 << HELD_SLOT_RINGS_BITS,
	LAST_ITEMS_BITS = 12,
	LAST_ITEMS = 1 << LAST_ITEMS_BITS,
};

enum pool_class {
	POOL_IS_NORMAL,
	POOL_IS_HIGHPRI,
	POOL_IS_UNBOUND,
	POOL_IS_SOFTIRQ,
};

struct held_slot {
	/* Identifies the max_active limit: a pwq, or a workqueue on a node. */
	u64 quota;
	u64 handler;
	/* 0: not in use. */
	u64 started_ns;
	/* 0: still in progress. */
	u64 ended_ns;
};

/* Ring of the latest items; several quotas may share a ring. */
struct held_slots {
	u64 position;
	struct held_slot slots[HELD_SLOTS];
};

/* The current item of a worker, or its last one. */
struct last_item {
	u64 worker;
	u64 item;
	/* `ended_ns` is 0 until it ends. */
	struct held_slot slot;
	/* Position in the ring of its quota. */
	u64 position;
};

struct explained_item {
	struct late_item late;
	/* 0: not seen. */
	u64 woken_ns;
	u64 moved_ns;
	u64 worker_created_ns;
	u32 moved_from;
	/* enum pool_class */
	u32 pool;
	/* Items that ended before this may have been overwritten; 0: none was. */
	u64 holders_since_ns;
	struct held_slot previous;
	/* In no order. Those in use have an end, at the latest that of the window. */
	struct held_slot slots[HELD_SLOTS];
};

struct explanation {
	struct explained_item item;
	/* Last, because its unused part is not sent. */
	struct window window;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	/* User space sets it to HELD_SLOT_RINGS if causes are wanted. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct held_slots);
} held_slots_by_quota SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	/* User space sets it to LAST_ITEMS if causes are wanted. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct last_item);
} last_item_by_worker SEC(".maps");

/* Too large for the stack; programs that use it do not nest on a CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct explanation);
} explanation_to_send SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	/* User space enlarges it if causes are wanted. */
	__uint(max_entries, 4096);
} explained_items SEC(".maps");

static __always_inline struct last_item *last_item_of(u64 worker)
{
	u32 index = hash_of(low_half(worker), LAST_ITEMS_BITS);

	return bpf_map_lookup_elem(&last_item_by_worker, &index);
}

static __always_inline u64 quota_of(u64 pwq)
{
	const struct pool_workqueue *of = (const struct pool_workqueue *)pwq;
	const struct worker_pool *pool;

	if (!of)
		return 0;
	pool = BPF_CORE_READ(of, pool);
	if (!max_active_is_per_node(pool))
		return pwq;
	/* All kernel addresses have their upper bits in common. */
	return (u64)BPF_CORE_READ(of, wq) << 10 | (BPF_CORE_READ(pool, node) & 0x3ff);
}

static __always_inline struct held_slots *held_slots_of(u64 quota)
{
	/* A pwq is aligned to 256 bytes, as its address shares a word with flags. */
	u32 index = hash_of(low_half(quota >> 8), HELD_SLOT_RINGS_BITS);

	return bpf_map_lookup_elem(&held_slots_by_quota, &index);
}

/* Overwrites the oldest item, preferably one that has ended. */
static __always_inline u64 keep_slot(struct held_slots *held, const struct held_slot *from)
{
	struct held_slot *slot = NULL;
	u64 position = 0;

	for (u32 probe = 0; probe < HELD_SLOT_PROBES; probe++) {
		position = __sync_fetch_and_add(&held->position, 1);
		slot = &held->slots[position % HELD_SLOTS];
		if (!slot->started_ns || slot->ended_ns)
			break;
	}
	if (!slot)
		return 0;
	/* A reader on another CPU ignores a slot without a start. */
	slot->started_ns = 0;
	barrier();
	slot->quota = from->quota;
	slot->handler = from->handler;
	slot->ended_ns = from->ended_ns;
	barrier();
	slot->started_ns = from->started_ns;
	return position;
}

/* The pwq of an item that starts, even if its queueing was not seen; 0 if unknown. */
static __always_inline u64 pwq_of_started(const struct work_struct *work, const struct task_struct *task)
{
	if (taken_under_lock)
		return pwq_of_queued(work);
	if (!task || !(task->flags & PF_WQ_WORKER))
		return 0;
	return (u64)BPF_CORE_READ(worker_of(task), current_pwq);
}

/* The item holds a slot of max_active, since it was activated. */
static __always_inline void item_took_slot(u64 worker, const struct work_struct *work, u64 pwq, u64 now_ns)
{
	struct last_item *last = last_item_of(worker);
	struct held_slots *held;

	if (!last)
		return;
	/* A worker with the same hash has an item in progress. */
	if (last->worker && last->worker != worker && !last->slot.ended_ns)
		lose(LOST_HOLDERS);
	last->worker = worker;
	last->item = (u64)work;
	last->slot.quota = quota_of(pwq);
	last->slot.handler = (u64)work->func;
	last->slot.started_ns = now_ns;
	last->slot.ended_ns = 0;
	held = held_slots_of(last->slot.quota);
	if (held)
		last->position = keep_slot(held, &last->slot);
}

/* The item releases its slot of max_active. */
static __always_inline bool item_released_slot(u64 worker, u64 item)
{
	struct last_item *last = last_item_of(worker);
	struct held_slots *held;
	struct held_slot *slot;

	if (!last || last->worker != worker || last->item != item || last->slot.ended_ns)
		return false;
	last->slot.ended_ns = bpf_ktime_get_ns();
	held = held_slots_of(last->slot.quota);
	if (!held)
		return true;
	slot = &held->slots[last->position % HELD_SLOTS];
	if (slot->started_ns == last->slot.started_ns && slot->quota == last->slot.quota)
		slot->ended_ns = last->slot.ended_ns;
	else
		keep_slot(held, &last->slot);
	return true;
}

static __always_inline u32 class_of_pool(struct pool_workqueue *pwq)
{
	struct worker_pool *pool = BPF_CORE_READ(pwq, pool);

	if (bpf_core_enum_value_exists(enum worker_pool_flags, POOL_BH) && BPF_CORE_READ(pool, flags) & POOL_BH)
		return POOL_IS_SOFTIRQ;
	if (BPF_CORE_READ(pool, cpu) < 0)
		return POOL_IS_UNBOUND;
	return BPF_CORE_READ(pool, attrs, nice) < 0 ? POOL_IS_HIGHPRI : POOL_IS_NORMAL;
}

static __always_inline void copy_worker(struct explained_item *explained, u64 worker, const struct task_struct *task)
{
	const struct last_item *last = last_item_of(worker);
	const struct wakeup *wakeup;

	explained->woken_ns = 0;
	explained->moved_ns = 0;
	explained->moved_from = 0;
	explained->worker_created_ns = 0;
	__builtin_memset(&explained->previous, 0, sizeof(explained->previous));
	if (last && last->worker == worker && last->slot.ended_ns)
		__builtin_memcpy(&explained->previous, &last->slot, sizeof(explained->previous));
	if (explained->pool == POOL_IS_SOFTIRQ)
		return;
	explained->worker_created_ns = task->start_time;
	wakeup = wakeup_of(task->pid, true);
	if (!wakeup || wakeup->tid != (u32)task->pid)
		return;
	explained->woken_ns = wakeup->woken_ns;
	explained->moved_ns = wakeup->moved_ns;
	explained->moved_from = wakeup->moved_from;
}

/* A span of time, and statistics of the items that held slots in it. */
struct held_span {
	u64 quota;
	u64 from_ns;
	u64 until_ns;
	/* 0: none has ended. */
	u64 first_end_ns;
	/* As wide as the others: up to 6.2 the verifier rejects uninitialized padding between members. */
	u64 is_full;
};

/* Copies an item that held a slot in the span. Global, so that the verifier verifies one slot only. */
__noinline int copy_held_slot(struct held_slot *to, const struct held_slot *from, struct held_span *span)
{
	u64 ended_ns;

	if (!to || !from || !span)
		return 0;
	to->ended_ns = 0;
	ended_ns = from->ended_ns;
	if (!from->started_ns || (ended_ns && ended_ns <= span->from_ns)) {
		span->is_full = false;
		return 0;
	}
	if (ended_ns && (!span->first_end_ns || ended_ns < span->first_end_ns))
		span->first_end_ns = ended_ns;
	if (from->quota != span->quota || from->started_ns >= span->until_ns)
		return 0;
	__builtin_memcpy(to, from, sizeof(*to));
	/* It may end concurrently. */
	to->ended_ns = ended_ns ?: span->until_ns;
	return 0;
}

/* Copies the items that held slots in a span. */
static __always_inline void copy_held_slots(struct explained_item *explained, u64 quota, u64 from_ns, u64 until_ns)
{
	struct held_slots *held = held_slots_of(quota);
	struct held_span span = { .quota = quota, .from_ns = from_ns, .until_ns = until_ns, .is_full = held != NULL };

	for (u32 index = 0; index < HELD_SLOTS; index++) {
		if (held)
			copy_held_slot(&explained->slots[index], &held->slots[index], &span);
		else
			explained->slots[index].ended_ns = 0;
	}
	explained->holders_since_ns = span.is_full ? span.first_end_ns : 0;
}

/* The start of a late item. */
struct late_start {
	u64 handler;
	struct queueing queueing;
	u64 started_ns;
	u32 entry;
	/* enum queued_flags */
	u32 flags;
};

/* Global, so that the verifier verifies it once and not for every path that leads here. */
__noinline int explain_late(struct late_start *start)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct explanation *to_send;
	struct queuer *queuer;
	u32 zero = 0, count, entry;
	u64 size, late_ns;

	if (!start)
		return 0;
	late_ns = since(start->started_ns, start->queueing.queued_ns);
	if (!may_explain(&explained_items, sizeof(*to_send), late_ns, start->started_ns))
		return 0;
	entry = start->entry;
	queuer = bpf_map_lookup_elem(&queuer_by_entry, &entry);
	to_send = bpf_map_lookup_elem(&explanation_to_send, &zero);
	if (!queuer || !to_send)
		return 0;
	describe_late(&to_send->item.late, start->flags, queuer, start->handler);
	to_send->item.late.queued_ns = start->queueing.queued_ns;
	to_send->item.late.activated_ns = start->queueing.activated_ns;
	to_send->item.late.started_ns = start->started_ns;
	to_send->item.pool = class_of_pool((struct pool_workqueue *)queuer->pwq);
	copy_worker(&to_send->item, start->flags & ITEM_IS_BH ? bh_worker() : (u64)task, task);
	/* An item that was activated at once did not wait for a slot. */
	copy_held_slots(&to_send->item, quota_of(queuer->pwq),
			start->queueing.activated_ns ? start->queueing.queued_ns : start->started_ns, start->started_ns);
	count = copy_window(&to_send->window, start->queueing.queued_ns, start->started_ns);
	if (count > WINDOW_INTERVALS)
		count = WINDOW_INTERVALS;
	size = sizeof(*to_send) - (WINDOW_INTERVALS - count) * sizeof(struct interval);
	if (size > sizeof(*to_send))
		return 0;
	send_explained(&explained_items, to_send, size, late_ns);
	return 0;
}
