/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Whether a CPU is in an interrupt, by its preemption count. Not every interrupt has tracepoints: those of Hyper-V's
 * VMBus, of KVM's asynchronous page faults and of posted interrupts have none.
 */
#pragma once

/*
 * Distance of each CPU's `pcpu_hot` or `__preempt_count` from its `runqueues`; 0 if the kernel's BTF lacks them. Their
 * addresses would need CONFIG_KALLSYMS_ALL.
 */
const volatile s64 preempt_count_distance = 0;

/* Bits of the preemption count (include/linux/preempt.h). A thread with softirqs disabled sets higher bits than the first one. */
enum {
	SERVES_SOFTIRQ = 1 << 8,
	/* Hard interrupts and NMIs. */
	IN_HARDIRQ = 0xff0000,
	IN_INTERRUPT = SERVES_SOFTIRQ | IN_HARDIRQ,
};

static __always_inline bool has_count_in_thread(const struct task_struct *current)
{
	return bpf_core_field_exists(current->thread_info.preempt_count);
}

/* Whether programs can read the preemption count: in the thread on arm64, next to the CPU's run queue on x86. */
static __always_inline bool has_preempt_count(const struct task_struct *current)
{
	return has_count_in_thread(current) || preempt_count_distance;
}

/* Address of this CPU's preemption count; 0 if that is unknown, or in the thread. */
static __always_inline u64 preempt_count_here(const struct task_struct *current)
{
	u64 run_queue = preempt_count_distance ? run_queue_of(current) : 0;

	return run_queue ? preempt_count_in(run_queue + preempt_count_distance) : 0;
}

/* The set bits of IN_INTERRUPT; none if unknown. With PREEMPT_RT softirqs run in threads, and set none. */
static __always_inline u32 interrupts_in(const struct task_struct *current, u64 preempt_count)
{
	if (has_count_in_thread(current))
		return current->thread_info.preempt_count & IN_INTERRUPT;
	return preempt_count ? read_u32(preempt_count) & IN_INTERRUPT : 0;
}

/* Variant that finds the address of the count itself. */
static __always_inline u32 interrupts_here(const struct task_struct *current)
{
	return interrupts_in(current, has_count_in_thread(current) ? 0 : preempt_count_here(current));
}
