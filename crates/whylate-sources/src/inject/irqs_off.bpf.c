// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Interrupts off for a known time, on the CPU of the caller. */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include "disturbance.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* 6.14. User space looks for it first: a program without it does not load. */
extern void bpf_local_irq_save(unsigned long *flags) __weak __ksym;
extern void bpf_local_irq_restore(unsigned long *flags) __weak __ksym;

SEC("syscall")
int keep_interrupts_off(void *context)
{
	unsigned long flags;

	bpf_local_irq_save(&flags);
	disturb();
	bpf_local_irq_restore(&flags);
	return 0;
}
