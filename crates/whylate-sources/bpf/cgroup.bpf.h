/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The cgroup of a thread. */
#pragma once

/* Use the controller `cpu` of cgroup v1: containers are there, and all threads in the root of v2, if it is mounted. */
const volatile bool has_cgroups_of_v1 = false;

/* The thread's own cgroup; NULL for the controller `cpu` if the thread is in an autogroup (of its session). */
static __always_inline const struct cgroup *cgroup_of(const struct task_struct *task)
{
	/* With CONFIG_CGROUPS. */
	if (!bpf_core_field_exists(task->cgroups))
		return NULL;
	if (!has_cgroups_of_v1)
		return task->cgroups->dfl_cgrp;
	return bpf_core_field_exists(task->sched_task_group) ? task->sched_task_group->css.cgroup : NULL;
}

/* Its ID, which is the inode of its directory; 0 without one. */
static __always_inline u64 cgroup_number_of(const struct task_struct *task)
{
	const struct cgroup *cgroup = cgroup_of(task);

	return cgroup ? cgroup->kn->id : 0;
}
