// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * In which system call each thread sleeps: first of what began before anything was recorded, then of waits that last. 0.2 us a thread.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>
#include "compat.bpf.h"
#include "registers.bpf.h"
#include "pid_namespace.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Bits of task_struct.flags: threads that come back from no system call. */
enum {
	PF_USER_WORKER = 0x4000,
	PF_KTHREAD = 0x200000,
};

struct thread_asleep {
	/* Its number and that of its process, as they are shown. */
	u32 tid;
	u32 process;
	s32 syscall;
	/* Its number of switches, which is another one in its next wait. */
	u32 switches;
};

/* Nothing is ever in it: it puts the type that user space shares into the skeleton. */
struct {
	struct thread_asleep thread_asleep;
} layouts = {};

SEC("iter/task")
int on_each_thread(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct thread_asleep asleep = {};

	if (!task || task->exit_state || task->flags & (PF_KTHREAD | PF_IO_WORKER | PF_USER_WORKER))
		return 0;
	if (task->on_cpu || !(task->__state & ~TASK_WAKING))
		return 0;
	asleep.syscall = syscall_of(task);
	if (asleep.syscall < 0)
		return 0;
	asleep.tid = shown_number(task);
	asleep.process = shown_process(task);
	asleep.switches = task->nvcsw + task->nivcsw;
	bpf_seq_write(ctx->meta->seq, &asleep, sizeof(asleep));
	return 0;
}
