/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What kept a runnable thread off every CPU, or may have, for the record of its wait. */
#pragma once

#include "cgroup.bpf.h"
#include "throttling.bpf.h"

/* A span of throttling; 0 to 0: none. */
struct throttled_span {
	u64 from_ns;
	u64 until_ns;
};

struct limits {
	/* Until when a quota kept it off: it was throttled when it was switched out or woken. 0: it was not. */
	u64 until_ns;
	/* When it was throttled later, in any order, and by which cgroup's quota. */
	struct throttled_span later[THROTTLES];
	u64 later_cgroup;
	/* When its own budget was replenished (SCHED_DEADLINE); 0: it has none, or had not exhausted it. */
	u64 deadline_ns;
	/* The nearest cgroup with a CPU quota, from its own upwards; 0: there is none. */
	u64 quota_cgroup;
	/* The cgroup that determines its share. */
	u64 own_cgroup;
	/* enum throttled_by, when its wait started. */
	u32 throttled_by;
	u8 has_sched_ext;
	u8 has_core_scheduling;
	u16 _unused;
};

/*
 * When its cfs_rq was throttled while it waited there, up to 6.17: the previously running thread was switched out for that.
 * Only the last few throttles are known; earlier ones are reported as if there was no throttling.
 */
static __noinline int add_throttles(struct limits *limits, struct task_struct *task, u64 from_ns, u64 now_ns)
{
	const struct throttles *throttles;
	struct task_group *group;

	if (!limits || !task)
		return 0;
	group = group_of(task);
	for (u32 level = 0; level < GROUP_LEVELS && group; level++) {
		throttles = throttles_of(group);
		if (throttles && throttles->group == (u64)group) {
			for (u32 i = 0; i < THROTTLES; i++) {
				u64 since_ns = throttles->since_ns[i];

				if (since_ns < from_ns || since_ns >= now_ns)
					continue;
				limits->later[i].from_ns = since_ns;
				limits->later[i].until_ns = quota_filled_ns(group, since_ns);
				limits->later_cgroup = cgroup_of_group(group);
			}
			if (limits->later_cgroup)
				return 0;
		}
		group = BPF_CORE_READ(group, parent);
	}
	return 0;
}

/* What kept the thread off its CPU between these times, at its switch-in; `throttled_by` when its wait started. */
static __noinline int tell_limits(struct limits *limits, struct task_struct *task, u64 from_ns, u64 now_ns, u32 throttled_by)
{
	struct task_group *group;
	u64 refilled_ns;

	if (!limits || !task)
		return 0;
	__builtin_memset(limits, 0, sizeof(*limits));
	limits->throttled_by = throttled_by;
	limits->has_sched_ext = is_of_sched_ext(task);
	limits->has_core_scheduling = has_core_scheduling(task);
	refilled_ns = deadline_refilled_ns(task);
	if (refilled_ns > from_ns && refilled_ns <= now_ns)
		limits->deadline_ns = refilled_ns;
	group = group_of(task);
	limits->own_cgroup = cgroup_of_group(group);
	if (!may_be_throttled(task))
		return 0;
	group = group_with_quota(group);
	if (!group)
		return 0;
	limits->quota_cgroup = cgroup_of_group(group);
	if (throttled_by == THROTTLED_BY_QUOTA)
		limits->until_ns = cpu_quota_filled_ns(task, from_ns);
	if (queues_are_throttled())
		add_throttles(limits, task, from_ns, now_ns);
	return 0;
}
