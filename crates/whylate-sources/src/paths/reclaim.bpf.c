// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Sends each span in which a thread reclaimed or compacted memory itself, as it needed some. The spans of one thread are never within each
 * other: while a thread reclaims, it allocates from the reserves (PF_MEMALLOC).
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>
#include "lost.bpf.h"
#include "pid_namespace.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

enum reclaim_limits {
	/* Threads that reclaim at the same time. */
	RECLAIMING_THREADS = 8192,
	/* Size of the ring buffer, some 14,000 spans. */
	RING_BYTES = 1 << 20,
	CGROUP_LEVELS = 16,
	/* More pages than any reclaim frees. */
	MAX_FREED = 1 << 30,
};

enum reclaim_kind {
	/* Memory of a cgroup, as it or one above it is at its limit. */
	RECLAIM_OF_CGROUP,
	/* Memory of the machine. */
	RECLAIM_DIRECT,
	RECLAIM_COMPACTION,
};

/* Spans that could not be counted, by reason. */
enum lost_reclaim {
	/* No room in the ring buffer, or in the map of threads. */
	LOST_RECLAIM_FULL,
	/* It began before the programs were attached. */
	LOST_RECLAIM_BEGAN_EARLIER,
	LOST_RECLAIM_REASONS,
};

struct reclaim_span {
	u64 from_ns;
	u64 to_ns;
	/* ID of the cgroup at its limit; 0: none has a limit. */
	u64 cgroup;
	/* Number of pages that were freed. */
	u64 pages;
	/* As shown. */
	u32 tid;
	u32 process;
	u32 kind;
	u32 reserved;
	/* Name of the process. */
	u8 name[16];
};

/* Always empty: puts the types that user space shares into the skeleton. */
struct {
	struct reclaim_span reclaim_span;
	enum reclaim_kind reclaim_kind;
	enum lost_reclaim lost_reclaim;
} layouts = {};

LOST_EVENTS(lost_reclaim, LOST_RECLAIM_REASONS)

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, RING_BYTES);
} reclaim_spans SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, RECLAIMING_THREADS);
	/* In the first PID namespace. */
	__type(key, u32);
	__type(value, struct reclaim_span);
} reclaiming_by_tid SEC(".maps");

/*
 * No tracepoint says for which cgroup the kernel reclaims. It charges each cgroup from the thread's own upwards, and reclaims for the first
 * one without room: here, the first one that is full, else the first above memory.high, else the one with the least room. 0: none has a
 * limit.
 */
static __always_inline u64 cgroup_at_limit(struct task_struct *task)
{
	const struct cgroup_subsys_state *state = NULL;
	struct css_set *set = BPF_CORE_READ(task, cgroups);
	u64 found = 0, least = ~0ull;

	if (!set || !bpf_core_enum_value_exists(enum cgroup_subsys_id, memory_cgrp_id))
		return 0;
	bpf_probe_read_kernel(&state, sizeof(state),
			      (const void *)set + bpf_core_field_offset(struct css_set, subsys) +
				      bpf_core_enum_value(enum cgroup_subsys_id, memory_cgrp_id) * sizeof(state));
	/* Charged in place of its own, as for swap-in and io_uring. */
	if (bpf_core_field_exists(task->active_memcg) && BPF_CORE_READ(task, active_memcg))
		state = (const void *)BPF_CORE_READ(task, active_memcg) + bpf_core_field_offset(struct mem_cgroup, css);
	for (u32 level = 0; level < CGROUP_LEVELS && state; level++) {
		const struct mem_cgroup *memory = (const void *)state - bpf_core_field_offset(struct mem_cgroup, css);
		u64 usage = BPF_CORE_READ(memory, memory.usage.counter);
		u64 max = BPF_CORE_READ(memory, memory.max), high = BPF_CORE_READ(memory, memory.high);
		/* 0: full. 1: above memory.high. */
		u64 room = usage >= max ? 0 : usage > high ? 1 : 2 + (max < high ? max : high) - usage;

		/* Without a limit it is the largest value (PAGE_COUNTER_MAX), more pages than any machine has. */
		if ((max < 1ull << 46 || high < 1ull << 46) && room < least) {
			least = room;
			found = BPF_CORE_READ(state, cgroup, kn, id);
		}
		state = BPF_CORE_READ(state, parent);
	}
	return found;
}

static __always_inline int begin_span(u32 kind)
{
	struct task_struct *task = bpf_get_current_task_btf();
	u32 tid = task->pid;
	struct reclaim_span span = {};
	struct reclaim_span *started;

	span.kind = kind;
	if (kind == RECLAIM_OF_CGROUP)
		span.cgroup = cgroup_at_limit(task);
	span.tid = shown_number(task);
	span.process = shown_process(task);
	BPF_CORE_READ_STR_INTO(&span.name, task, group_leader, comm);
	/* Replaces a span without a recorded end. */
	if (bpf_map_update_elem(&reclaiming_by_tid, &tid, &span, BPF_ANY)) {
		lose(LOST_RECLAIM_FULL);
		return 0;
	}
	started = bpf_map_lookup_elem(&reclaiming_by_tid, &tid);
	/* Last, as a span may be as short as this program is. */
	if (started)
		started->from_ns = bpf_ktime_get_ns();
	return 0;
}

static __always_inline int end_span(u64 pages)
{
	u64 now_ns = bpf_ktime_get_ns();
	u32 tid = bpf_get_current_task_btf()->pid;
	struct reclaim_span *started = bpf_map_lookup_elem(&reclaiming_by_tid, &tid);
	struct reclaim_span span;

	if (!started) {
		lose(LOST_RECLAIM_BEGAN_EARLIER);
		return 0;
	}
	span = *started;
	bpf_map_delete_elem(&reclaiming_by_tid, &tid);
	span.to_ns = now_ns;
	/* Another argument in a later kernel would be no number of pages. */
	span.pages = pages < MAX_FREED ? pages : 0;
	if (bpf_ringbuf_output(&reclaim_spans, &span, sizeof(span), BPF_RB_NO_WAKEUP))
		lose(LOST_RECLAIM_FULL);
	return 0;
}

/* With CONFIG_MEMCG. */
SEC("?tp_btf/mm_vmscan_memcg_reclaim_begin")
int BPF_PROG(on_memcg_reclaim_begin)
{
	return begin_span(RECLAIM_OF_CGROUP);
}

SEC("?tp_btf/mm_vmscan_memcg_reclaim_end")
int BPF_PROG(on_memcg_reclaim_end, unsigned long pages)
{
	return end_span(pages);
}

SEC("?tp_btf/mm_vmscan_direct_reclaim_begin")
int BPF_PROG(on_direct_reclaim_begin)
{
	return begin_span(RECLAIM_DIRECT);
}

SEC("?tp_btf/mm_vmscan_direct_reclaim_end")
int BPF_PROG(on_direct_reclaim_end, unsigned long pages)
{
	return end_span(pages);
}

/* With CONFIG_COMPACTION. */
SEC("?tp_btf/mm_compaction_begin")
int BPF_PROG(on_compaction_begin)
{
	return begin_span(RECLAIM_COMPACTION);
}

SEC("?tp_btf/mm_compaction_end")
int BPF_PROG(on_compaction_end)
{
	return end_span(0);
}
