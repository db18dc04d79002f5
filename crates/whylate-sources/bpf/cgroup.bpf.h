/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Which cgroup a thread is in. */
#pragma once

/* By the controller `cpu` of cgroup v1: containers are there, and all threads in the root of v2, if it is mounted. */
const volatile bool has_cgroups_of_v1 = false;

/* The thread's own cgroup; of the controller `cpu` NULL where its threads have a group for a session (autogroup). */
static __always_inline const struct cgroup *cgroup_of(const struct task_struct *task)
{
	/* With CONFIG_CGROUPS. */
	if (!bpf_core_field_exists(task->cgroups))
		return NULL;
	if (!has_cgroups_of_v1)
		return task->cgroups->dfl_cgrp;
	return bpf_core_field_exists(task->sched_task_group) ? task->sched_task_group->css.cgroup : NULL;
}

/* Its number, which is that of its folder; 0 without one. */
static __always_inline u64 cgroup_number_of(const struct task_struct *task)
{
	const struct cgroup *cgroup = cgroup_of(task);

	return cgroup ? cgroup->kn->id : 0;
}
