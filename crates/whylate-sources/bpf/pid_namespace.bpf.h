/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The numbers of threads as whoever looks knows them: those of its own PID namespace. Programs tell threads apart by the
 * kernel's numbers, and write these into what is shown. In the first namespace they are the same, at no cost.
 */
#pragma once

enum {
	/* MAX_PID_NS_LEVEL (include/linux/pid_namespace.h) */
	NAMESPACE_LEVELS = 32,
};

/* With the kernel's number: the thread has none in that namespace (whylate_model::thread). */
#define OUTSIDE (1u << 31)

/* The inode of the namespace; 0: it is the first one. */
const volatile u32 own_namespace = 0;

/*
 * 0: the thread is neither in that namespace nor in one below, or has ended. The verifier looks at it by itself, once,
 * which it does where the thread is given by its address.
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
	/* At level 0 is the first namespace. */
	for (u32 i = 1; i <= NAMESPACE_LEVELS && i <= level; i++) {
		const struct upid *number = (const void *)pid + bpf_core_field_offset(struct pid, numbers) + i * bpf_core_type_size(struct upid);

		if (BPF_CORE_READ(number, ns, ns.inum) == own_namespace)
			return BPF_CORE_READ(number, nr);
	}
	return 0;
}

/* The same, or what tells a thread outside. A function of its own: where it is called, the verifier sees one way on. */
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

/* 0 of a thread outside. */
static __always_inline u32 own_number(const struct task_struct *task)
{
	return own_namespace ? number_in_own_namespace(task) : (u32)task->pid;
}

/* Of a thread with this number of the kernel's; different ones differ, also outside. Idle CPUs have 0 everywhere. */
static __always_inline u32 shown_as(const struct task_struct *task, u32 number)
{
	u64 address = (u64)task;

	return own_namespace && number ? (u32)shown_by_address(&address, number) : number;
}

static __always_inline u32 shown_number(const struct task_struct *task)
{
	return shown_as(task, task->pid);
}

/* The same of its process. */
static __always_inline u32 shown_process(const struct task_struct *task)
{
	return own_namespace ? shown_as(task->group_leader, task->tgid) : (u32)task->tgid;
}
