/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The numbers of threads as whoever looks knows them: those of its own namespace of process ids. */
#pragma once

enum {
	/* MAX_PID_NS_LEVEL (include/linux/pid_namespace.h) */
	NAMESPACE_LEVELS = 32,
};

/* The inode of the namespace; 0: numbers are those of the first one. */
const volatile u32 own_namespace = 0;

/* 0: it is not in that namespace, or in one below. */
static __noinline u32 own_number(struct task_struct *task)
{
	struct pid *pid;
	u32 level;

	if (!task)
		return 0;
	if (!own_namespace)
		return BPF_CORE_READ(task, pid);
	pid = BPF_CORE_READ(task, thread_pid);
	level = BPF_CORE_READ(pid, level);
	for (u32 i = 0; i <= NAMESPACE_LEVELS && i <= level; i++) {
		struct upid *number = (void *)pid + bpf_core_field_offset(struct pid, numbers) + i * bpf_core_type_size(struct upid);

		if (BPF_CORE_READ(number, ns, ns.inum) == own_namespace)
			return BPF_CORE_READ(number, nr);
	}
	return 0;
}
