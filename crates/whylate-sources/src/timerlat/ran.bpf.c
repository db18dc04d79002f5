// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * When a measured thread ran again. The kernel's timerlat tracer samples its threads there, in the thread; that a
 * thread has the CPU is some steps before, among them the change to its address space.
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
	/* A signal may have ended its sleep before its timer came in, which has not given it the CPU then. */
	if (activation->thread_ns)
		activation->thread_ns = bpf_ktime_get_ns();
	return 0;
}
