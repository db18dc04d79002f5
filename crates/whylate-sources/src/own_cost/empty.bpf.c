// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* An empty program: its run time, as the kernel counts it, is the time for counting. */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

SEC("tp_btf/sched_switch")
int BPF_PROG(on_sched_switch)
{
	return 0;
}
