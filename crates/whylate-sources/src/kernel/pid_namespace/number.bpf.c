// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Returns a process's PID in the initial namespace: user space selects the process that the iterator visits. */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

SEC("iter/task")
int on_each_thread_tell(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;

	if (task)
		bpf_seq_write(ctx->meta->seq, &task->tgid, sizeof(task->tgid));
	return 0;
}
