// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Disables interrupts or preemption for a known time on the caller's CPU. User space loads the program that it needs. */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include "disturbance.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* User space checks for them first: a program without them does not load. 6.14: */
extern void bpf_local_irq_save(unsigned long *flags) __weak __ksym;
extern void bpf_local_irq_restore(unsigned long *flags) __weak __ksym;
/* 6.10: */
extern void bpf_preempt_disable(void) __weak __ksym;
extern void bpf_preempt_enable(void) __weak __ksym;

SEC("?syscall")
int keep_interrupts_off(void *context)
{
	unsigned long flags;

	bpf_local_irq_save(&flags);
	disturb();
	bpf_local_irq_restore(&flags);
	return 0;
}

SEC("?syscall")
int keep_preemption_off(void *context)
{
	bpf_preempt_disable();
	disturb();
	bpf_preempt_enable();
	return 0;
}
