/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Who queued an item, and the report of one that was late. */
#pragma once

struct queuer {
	u32 tid;
	u32 pid;
	/* Kernel stack, negative without one. */
	s32 stack;
	char comm[16];
};

/* The queuers of the items in the set of the same index. */
struct queuer_set {
	struct queuer queuers[WAYS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	/* User space makes it as large as queued_items where late events are asked for. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct queuer_set);
} queuers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} late_items SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_STACK_TRACE);
	/* User space makes it larger where stacks are asked for. */
	__uint(max_entries, 1);
	__uint(key_size, sizeof(u32));
	__uint(value_size, STACK_FRAMES * sizeof(u64));
} queueing_stacks SEC(".maps");

static __always_inline struct queuer *queuer_at(struct item_place *place)
{
	struct queuer_set *set = bpf_map_lookup_elem(&queuers, &place->set_index);

	if (!set || place->way >= WAYS)
		return NULL;
	return &set->queuers[place->way];
}

static __always_inline void remember_queuer(void *ctx, struct item_place *place)
{
	u64 id = bpf_get_current_pid_tgid();
	struct queuer *queuer = queuer_at(place);

	if (!queuer)
		return;
	queuer->tid = (u32)id;
	queuer->pid = id >> 32;
	bpf_get_current_comm(queuer->comm, sizeof(queuer->comm));
	queuer->stack = -1;
	if (keep_stacks) {
		queuer->stack = bpf_get_stackid(ctx, &queueing_stacks, 0);
		if (queuer->stack < 0)
			lose(LOST_STACKS);
	}
}

static __always_inline void report_late(struct item_place *place, const struct queued_item *queued, u64 queued_ns,
					u64 activated_ns, u64 now_ns)
{
	struct queuer *queuer = queuer_at(place);
	struct late_item *late;

	if (!queuer)
		return;
	late = bpf_ringbuf_reserve(&late_items, sizeof(*late), 0);
	if (!late) {
		lose(LOST_LATE_EVENTS);
		return;
	}
	late->queued_ns = queued_ns;
	late->activated_ns = activated_ns;
	late->started_ns = now_ns;
	late->cpu = bpf_get_smp_processor_id();
	late->worker_tid = (u32)bpf_get_current_pid_tgid();
	late->by_rescuer = !queued->is_bh && is_rescuer(bpf_get_current_task_btf());
	late->tid = queuer->tid;
	late->pid = queuer->pid;
	late->stack = queuer->stack;
	__builtin_memcpy(late->comm, queuer->comm, sizeof(late->comm));
	bpf_get_current_comm(late->worker_comm, sizeof(late->worker_comm));
	write_symbol(late->handler, queued->handler);
	bpf_core_read_str(late->workqueue, sizeof(late->workqueue), &((struct workqueue_struct *)queued->workqueue)->name);
	bpf_ringbuf_submit(late, 0);
}
