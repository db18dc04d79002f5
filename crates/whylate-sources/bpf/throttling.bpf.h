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

/*
 * When the quota of a group was first refilled after `since_ns`; 0 without a quota. Global, so that the verifier follows it once and not
 * at each level; a global function takes the group by its address.
 */
__noinline u64 filled_ns_of_group(const u64 *address, u64 since_ns)
{
	const struct task_group *group;

	if (!address)
		return 0;
	group = (const struct task_group *)*address;
	return has_quota(group) ? quota_filled_ns(group, since_ns) : 0;
}

/*
 * When a quota of the thread's cgroups was first refilled after `since_ns`. 0 without a quota. With several quotas, the latest of these
 * times: which of them was exhausted is unknown.
 */
static __always_inline u64 cpu_quota_filled_ns(const struct task_struct *task, u64 since_ns)
{
	u64 group = (u64)group_for_quota_of(task), filled_ns = 0, group_filled_ns;

	for (u32 level = 0; level < GROUP_LEVELS && group; level++) {
		group_filled_ns = filled_ns_of_group(&group, since_ns);
		if (group_filled_ns > filled_ns)
			filled_ns = group_filled_ns;
		group = (u64)BPF_CORE_READ((const struct task_group *)group, parent);
	}
	return filled_ns;
}

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
