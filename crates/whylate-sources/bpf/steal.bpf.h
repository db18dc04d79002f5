/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Variables of the kernel for each CPU: what the hypervisor has taken, and what an interrupt found. User space tells
 * how far they lie from `hrtimer_bases`, to which each timer leads; 0 where the kernel has no such variable.
 */
#pragma once

/* Of `steal_time`, which KVM brings up to date whenever it lets the CPU go on (arch/x86/kernel/kvm.c). */
const volatile s64 steal_time_distance = 0;
/* Of `__irq_regs`, a pointer to the registers of what the present interrupt has interrupted (lib/irq_regs.c). */
const volatile s64 irq_registers_distance = 0;

static __always_inline u64 timer_bases_here(const struct hrtimer *timer)
{
	return (u64)BPF_CORE_READ(timer, base, cpu_base);
}

/* The steal clock of this CPU. Elsewhere than with KVM, what its run queue knew at the last switch or tick. */
static __always_inline u64 steal_clock_ns(u64 timer_bases)
{
	const struct kvm_steal_time *steal = (const void *)(timer_bases + steal_time_distance);
	const struct task_struct *task;

	if (steal_time_distance && timer_bases)
		return BPF_CORE_READ(steal, steal);
	task = bpf_get_current_task_btf();
	if (!bpf_core_field_exists(task->se.cfs_rq) || !bpf_core_field_exists(struct rq, prev_steal_time_rq))
		return 0;
	return BPF_CORE_READ(task, se.cfs_rq, rq, prev_steal_time_rq);
}

/* Whether the present interrupt has interrupted user code; false where that cannot be told. */
static __always_inline bool user_is_interrupted(u64 timer_bases)
{
	const struct pt_regs *registers = NULL;

	if (!irq_registers_distance || !timer_bases || !bpf_core_field_exists(struct pt_regs, cs))
		return false;
	if (bpf_probe_read_kernel(&registers, sizeof(registers), (const void *)(timer_bases + irq_registers_distance)) || !registers)
		return false;
	/* The lowest two bits are the level of privilege, of which the kernel has 0 (x86). */
	return BPF_CORE_READ(registers, cs) & 3;
}
