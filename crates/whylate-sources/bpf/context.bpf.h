/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Whether a CPU is in an interrupt, by its preemption count. Tracepoints do not show every interrupt: those of Hyper-V's
 * VMBus, of KVM's asynchronous page faults and of posted interrupts have none.
 */
#pragma once

/*
 * How far each CPU's `pcpu_hot` or `__preempt_count` lies from its `runqueues`; 0 where the kernel's BTF does not say so.
 * Their addresses would take CONFIG_KALLSYMS_ALL.
 */
const volatile s64 preempt_count_distance = 0;

/* Bits of the preemption count (include/linux/preempt.h). A thread that has softirqs disabled has higher bits than the first. */
enum {
	SERVES_SOFTIRQ = 1 << 8,
	/* Hardware interrupts and NMIs. */
	IN_HARDIRQ = 0xff0000,
	IN_INTERRUPT = SERVES_SOFTIRQ | IN_HARDIRQ,
};

static __always_inline bool has_count_in_thread(const struct task_struct *current)
{
	return bpf_core_field_exists(current->thread_info.preempt_count);
}

/* The kernel gives programs the preemption count: in the thread on arm64, beside the CPU's run queue on x86. */
static __always_inline bool has_preempt_count(const struct task_struct *current)
{
	return has_count_in_thread(current) || preempt_count_distance;
}

/* Address of this CPU's preemption count; 0 where that is unknown, or in the thread. */
static __always_inline u64 preempt_count_here(const struct task_struct *current)
{
	u64 run_queue = preempt_count_distance ? run_queue_of(current) : 0;

	return run_queue ? preempt_count_in(run_queue + preempt_count_distance) : 0;
}

/* Those of IN_INTERRUPT that are set; none where that is unknown. With PREEMPT_RT softirqs run in threads, and set none. */
static __always_inline u32 interrupts_in(const struct task_struct *current, u64 preempt_count)
{
	if (has_count_in_thread(current))
		return current->thread_info.preempt_count & IN_INTERRUPT;
	return preempt_count ? read_u32(preempt_count) & IN_INTERRUPT : 0;
}

/* The same where the address is not known yet. */
static __always_inline u32 interrupts_here(const struct task_struct *current)
{
	return interrupts_in(current, has_count_in_thread(current) ? 0 : preempt_count_here(current));
}
