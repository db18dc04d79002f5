// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Preemption off for a known time, on the CPU of the caller. */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include "disturbance.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* 6.10. User space looks for it first: a program without it does not load. */
extern void bpf_preempt_disable(void) __weak __ksym;
extern void bpf_preempt_enable(void) __weak __ksym;

SEC("syscall")
int keep_preemption_off(void *context)
{
	bpf_preempt_disable();
	disturb();
	bpf_preempt_enable();
	return 0;
}
