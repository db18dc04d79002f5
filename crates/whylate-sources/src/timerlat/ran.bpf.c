// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Timestamps when a measured thread runs again, in the thread, where the kernel's timerlat tracer samples its threads too.
 * The switch-in is some steps earlier, among them the switch of the address space.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "compat.bpf.h"
#include "activation.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

SEC("fexit/hrtimer_nanosleep")
int BPF_PROG(on_hrtimer_nanosleep_exit)
{
	struct activation *activation = activation_here();

	if (!activation || activation->task != (u64)bpf_get_current_task())
		return 0;
	/* If a signal ended the sleep before the timer expired, there was no switch-in by the timer. */
	if (activation->thread_ns)
		activation->thread_ns = bpf_ktime_get_ns();
	return 0;
}
