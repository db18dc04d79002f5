/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* User space registers, in the fields of each architecture's kernel (kernel_types.h). */
#pragma once

#include <bpf/bpf_core_read.h>

enum {
	/* The privilege level, 0 for the kernel (x86). */
	X86_CS_LEVEL = 3,
	/* The exception level; 0 for user space (arch/arm64/include/uapi/asm/ptrace.h). */
	ARM64_MODE = 0xf,
	/* arch/x86/include/asm/thread_info.h, arch/arm64/include/asm/thread_info.h */
	TS_COMPAT = 0x2,
	ARM64_TIF_32BIT = 1 << 22,
};

static __always_inline const struct pt_regs___of_arm64 *as_arm64(const struct pt_regs *regs)
{
	return (const void *)regs;
}

/*
 * A store that is ordered after earlier writes and before later ones, for readers without a lock. x86 keeps stores in
 * order; elsewhere an atomic exchange does.
 */
#define store_in_order(where, value)                                    \
	do {                                                            \
		const struct pt_regs *regs = NULL;                      \
                                                                        \
		if (bpf_core_field_exists(regs->orig_ax)) {             \
			barrier();                                      \
			*(where) = (value);                             \
			barrier();                                      \
		} else {                                                \
			__sync_lock_test_and_set((where), (value));     \
		}                                                       \
	} while (0)

/* Whether it is in a 32-bit system call, which have numbers of their own. */
static __always_inline bool is_in_compat_call(const struct task_struct *task)
{
	if (bpf_core_field_exists(task->thread_info.status))
		return task->thread_info.status & TS_COMPAT;
	return task->thread_info.flags & ARM64_TIF_32BIT;
}

/* The number of its system call; -1 for none, or if unknown. */
static __always_inline s32 syscall_of(struct task_struct *task)
{
	const struct pt_regs *regs = (const struct pt_regs *)bpf_task_pt_regs(task);

	if (is_in_compat_call(task))
		return -1;
	if (bpf_core_field_exists(regs->orig_ax))
		return (s32)regs->orig_ax;
	if (bpf_core_field_exists(as_arm64(regs)->syscallno))
		return as_arm64(regs)->syscallno;
	return -1;
}

/* The first argument of the thread's system call; -1 if unknown. */
static __always_inline u64 first_argument_of(struct task_struct *task)
{
	const struct pt_regs *regs = (const struct pt_regs *)bpf_task_pt_regs(task);

	if (bpf_core_field_exists(regs->di))
		return regs->di;
	if (bpf_core_field_exists(as_arm64(regs)->orig_x0))
		return as_arm64(regs)->orig_x0;
	return -1;
}

/* The second argument of its system call; -1 if unknown. */
static __always_inline u64 second_argument_of(struct task_struct *task)
{
	const struct pt_regs *regs = (const struct pt_regs *)bpf_task_pt_regs(task);

	if (bpf_core_field_exists(regs->si))
		return regs->si;
	if (bpf_core_field_exists(as_arm64(regs)->pstate))
		return as_arm64(regs)->regs[1];
	return -1;
}

/* The fourth argument of its system call; 0 if unknown. */
static __always_inline u64 fourth_argument_of(struct task_struct *task)
{
	const struct pt_regs *regs = (const struct pt_regs *)bpf_task_pt_regs(task);

	if (bpf_core_field_exists(regs->r10))
		return regs->r10;
	if (bpf_core_field_exists(as_arm64(regs)->pstate))
		return as_arm64(regs)->regs[3];
	return 0;
}

/* Whether registers saved by an interrupt are of user code; false if unknown. */
static __always_inline bool are_of_user(const struct pt_regs *regs)
{
	if (bpf_core_field_exists(regs->cs))
		return BPF_CORE_READ(regs, cs) & X86_CS_LEVEL;
	if (bpf_core_field_exists(as_arm64(regs)->pstate))
		return !(BPF_CORE_READ(as_arm64(regs), pstate) & ARM64_MODE);
	return false;
}
