/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * TIDs and PIDs in whylate's own PID namespace. Programs identify threads by the numbers of the first namespace, and
 * report these. In the first namespace both are equal, at no cost.
 */
#pragma once

enum {
	/* MAX_PID_NS_LEVEL (include/linux/pid_namespace.h) */
	NAMESPACE_LEVELS = 32,
};

/* Flag of a number of the first namespace: the thread has none in whylate's namespace (whylate_model::thread). */
#define OUTSIDE (1u << 31)

/* The inode of the namespace; 0: it is the first one. */
const volatile u32 own_namespace = 0;

/*
 * 0: the thread is neither in that namespace nor in one below, or has exited. Global, so that it is verified by itself,
 * once; a global function takes the thread by its address.
 */
__noinline int number_by_address(const u64 *address)
{
	const struct task_struct *task;
	const struct pid *pid;
	u32 level;

	if (!address)
		return 0;
	task = (const struct task_struct *)*address;
	pid = BPF_CORE_READ(task, thread_pid);
	level = BPF_CORE_READ(pid, level);
	/* Level 0 is the first namespace. */
	for (u32 i = 1; i <= NAMESPACE_LEVELS && i <= level; i++) {
		const struct upid *number = (const void *)pid + bpf_core_field_offset(struct pid, numbers) + i * bpf_core_type_size(struct upid);

		if (BPF_CORE_READ(number, ns, ns.inum) == own_namespace)
			return BPF_CORE_READ(number, nr);
	}
	return 0;
}

/* Variant that flags a thread outside. Global, so that the verifier follows only one path at the call. */
__noinline int shown_by_address(const u64 *address, u32 number)
{
	u32 own = number_by_address(address);

	return own ? own : OUTSIDE | number;
}

static __always_inline u32 number_in_own_namespace(const struct task_struct *task)
{
	u64 address = (u64)task;

	return number_by_address(&address);
}

/* 0 for a thread outside. */
static __always_inline u32 own_number(const struct task_struct *task)
{
	return own_namespace ? number_in_own_namespace(task) : (u32)task->pid;
}

/* For a thread with this number in the first namespace; unique, also outside. Idle tasks have 0 everywhere. */
static __always_inline u32 shown_as(const struct task_struct *task, u32 number)
{
	u64 address = (u64)task;

	return own_namespace && number ? (u32)shown_by_address(&address, number) : number;
}

static __always_inline u32 shown_number(const struct task_struct *task)
{
	return shown_as(task, task->pid);
}

/* Number of its process. */
static __always_inline u32 shown_process(const struct task_struct *task)
{
	return own_namespace ? shown_as(task->group_leader, task->tgid) : (u32)task->tgid;
}
