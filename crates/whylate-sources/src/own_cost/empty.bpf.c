// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* What the kernel's count of a program's run time is for a program that does nothing. */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

SEC("tp_btf/sched_switch")
int BPF_PROG(on_sched_switch)
{
	return 0;
}
