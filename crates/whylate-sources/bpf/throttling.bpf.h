/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What throttled a thread when it was switched out, or woken. */
#pragma once

#include "compat.bpf.h"

enum throttled_by {
	THROTTLED_NOT,
	/* A cgroup's CPU quota. */
	THROTTLED_BY_QUOTA,
	/* Real-time throttling. */
	THROTTLED_BY_REAL_TIME,
};

/* At a switch-out. Real-time throttling is not checked at a wakeup: it costs as much as all the rest there. */
static __always_inline u32 throttled_by(const struct task_struct *task)
{
	if (is_throttled(task))
		return THROTTLED_BY_QUOTA;
	return is_real_time_throttled(task) ? THROTTLED_BY_REAL_TIME : THROTTLED_NOT;
}

static __always_inline u32 throttled_by_when_woken(const struct task_struct *task, u32 cpu)
{
	return is_throttled(task) || finds_quota_used_up(task, cpu) ? THROTTLED_BY_QUOTA : THROTTLED_NOT;
}

enum throttling_limits {
	GROUP_SLOTS = 64,
	THROTTLES = 4,
};

/* When threads switched out on this CPU last left a throttled cfs_rq, with all threads that wait in it. */
struct throttles {
	/* The group with the exhausted quota; another group may take over the slot. */
	u64 group;
	u64 since_ns[THROTTLES];
	u32 next;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, GROUP_SLOTS);
	__type(key, u32);
	__type(value, struct throttles);
} throttles_by_group SEC(".maps");

static __always_inline struct throttles *throttles_of(const struct task_group *group)
{
	/* Groups are larger than 512 bytes. */
	u32 slot = (u64)group >> 9 & (GROUP_SLOTS - 1);

	return bpf_map_lookup_elem(&throttles_by_group, &slot);
}

/* A thread that is switched out may have used up the rest, and be blocked now: it is in no queue. */
static __always_inline void keep_throttle(const struct task_struct *prev, u64 now_ns)
{
	const struct task_group *group;
	struct throttles *throttles;

	if (!queues_are_throttled() || !is_throttled(prev))
		return;
	group = throttled_group_of(prev, bpf_get_smp_processor_id());
	throttles = group ? throttles_of(group) : NULL;
	if (!throttles)
		return;
	if (throttles->group != (u64)group) {
		__builtin_memset(throttles, 0, sizeof(*throttles));
		throttles->group = (u64)group;
	}
	throttles->since_ns[throttles->next++ % THROTTLES] = now_ns;
}
