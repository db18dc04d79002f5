// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The floor: what an event costs with an empty BPF program. */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

SEC("tp_btf/workqueue_queue_work")
int BPF_PROG(on_queue_work, int req_cpu, struct pool_workqueue *pwq, struct work_struct *work)
{
	return 0;
}

SEC("tp_btf/workqueue_execute_start")
int BPF_PROG(on_execute_start, struct work_struct *work)
{
	return 0;
}

SEC("tp_btf/sched_switch")
int BPF_PROG(on_switch)
{
	return 0;
}

/* A minimal iterator: it takes a stack of each thread, as both tools with iterators do, and nothing else. */
u64 frames[127];

SEC("iter/task")
int on_each_thread(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;

	if (task)
		bpf_get_task_stack(task, frames, sizeof(frames), 0);
	return 0;
}
