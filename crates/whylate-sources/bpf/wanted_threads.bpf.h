/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Which threads are selected. */
#pragma once

#include "cgroup.bpf.h"

enum {
	CGROUP_LEVELS = 16,
};

/* 0: all. */
const volatile u64 wanted_cgroup = 0;
const volatile char wanted_thread_name[16] = {};
const volatile bool has_wanted_thread_name = false;
const volatile char wanted_process_name[16] = {};
const volatile bool has_wanted_process_name = false;
const volatile bool take_kernel_threads = true;
const volatile bool take_user_threads = true;

static __always_inline bool is_in_wanted_cgroup(const struct cgroup *cgroup)
{
	for (u32 level = 0; level < CGROUP_LEVELS && cgroup; level++) {
		if (BPF_CORE_READ(cgroup, kn, id) == wanted_cgroup)
			return true;
		/* struct cgroup starts with its own css. */
		cgroup = (const struct cgroup *)BPF_CORE_READ(cgroup, self.parent);
	}
	return false;
}

static __always_inline bool is_named(const struct task_struct *task, const volatile char *name)
{
	char comm[16];

	BPF_CORE_READ_STR_INTO(&comm, task, comm);
	for (u32 i = 0; i < sizeof(comm); i++) {
		if (comm[i] != name[i])
			return false;
		if (!comm[i])
			break;
	}
	return true;
}

static __always_inline bool is_wanted(const struct task_struct *task, bool is_kernel)
{
	if ((is_kernel && !take_kernel_threads) || (!is_kernel && !take_user_threads))
		return false;
	if (has_wanted_thread_name && !is_named(task, wanted_thread_name))
		return false;
	/* A process has the comm of its first thread. */
	if (has_wanted_process_name && !is_named(BPF_CORE_READ(task, group_leader), wanted_process_name))
		return false;
	return !wanted_cgroup || is_in_wanted_cgroup(cgroup_of(untrusted(struct task_struct, task)));
}
