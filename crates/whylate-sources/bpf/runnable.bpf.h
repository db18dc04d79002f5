/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A long run-queue wait of a thread, with the CPU's occupants during it. */
#pragma once

#include "limits.bpf.h"
#include "pid_namespace.bpf.h"
#include "window.bpf.h"

/* The kernel's role of a thread: its comm is not reliable. */
enum thread_role {
	ROLE_NONE,
	/* Of a workqueue. */
	ROLE_WORKER,
	/* Of io_uring. */
	ROLE_SUBMISSION_THREAD,
};

enum {
	/* Of the stack on which a thread blocked. */
	SLEEP_FRAMES = 24,
};

struct runnable_wait {
	u64 runnable_ns;
	u64 running_ns;
	struct moves moves;
	/* In whylate's PID namespace. */
	u32 tid;
	u32 tgid;
	u32 cpu;
	/* TID of the waker; 0 if unknown, or an interrupt. */
	u32 waker_tid;
	/* enum thread_role */
	u32 role;
	/* Number of frames in `slept_in`. */
	u32 frames;
	/* The item of a worker, or 0. */
	u64 handler;
	/* Of the thread; 0: none. */
	u64 cgroup;
	char waker[16];
	char process[16];
	char thread[16];
	struct limits limits;
	/* Time of the wakeup; 0: it was not blocked, or this is not wanted. */
	u64 woken_ns;
	/* Maximum time for which it was off-CPU. */
	u64 off_ns;
	/* enum stopper that had stopped it until then. */
	u32 stopper;
	/* enum entry_kind: what ended the wait. */
	u32 ended_by;
	/* The kernel counts the wait as I/O wait. */
	u32 in_iowait;
	u32 _unused;
	/* Stack on which it blocked, innermost first. */
	u64 slept_in[SLEEP_FRAMES];
	struct window window;
};

/* Minimum wait that is explained; 0: none is. */
const volatile u64 explain_over_ns = 0;

/* Too large for the stack; the program that writes it has interrupts off. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct runnable_wait);
} wait_to_send SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	/* User space enlarges it if waits are explained. */
	__uint(max_entries, 4096);
} runnable_waits SEC(".maps");

static __always_inline u32 role_of(const struct task_struct *task)
{
	if (task->flags & PF_WQ_WORKER)
		return ROLE_WORKER;
	return is_sq_thread(task) ? ROLE_SUBMISSION_THREAD : ROLE_NONE;
}

/* Memory of the record, to be filled in; NULL if the wait is not to be explained. */
static __always_inline struct runnable_wait *begin_runnable_wait(struct task_struct *task, u64 runnable_ns, u64 now_ns)
{
	struct runnable_wait *late;
	u32 zero = 0;

	if (!may_explain(&runnable_waits, sizeof(*late), since(now_ns, runnable_ns), now_ns))
		return NULL;
	late = bpf_map_lookup_elem(&wait_to_send, &zero);
	if (!late)
		return NULL;
	late->runnable_ns = runnable_ns;
	late->running_ns = now_ns;
	__builtin_memset(&late->moves, 0, sizeof(late->moves));
	late->tid = shown_number(task);
	late->tgid = shown_process(task);
	late->cpu = bpf_get_smp_processor_id();
	late->waker_tid = 0;
	late->frames = 0;
	late->woken_ns = 0;
	late->off_ns = 0;
	late->stopper = 0;
	late->ended_by = 0;
	late->in_iowait = 0;
	late->role = role_of(task);
	late->handler = late->role == ROLE_WORKER ? handler_of_worker(task) : 0;
	late->cgroup = cgroup_number_of(untrusted(struct task_struct, task));
	bpf_core_read(late->process, sizeof(late->process), &untrusted(struct task_struct, task)->group_leader->comm);
	bpf_core_read(late->thread, sizeof(late->thread), &task->comm);
	return late;
}

/* Sends the record without a window: it is late for another reason than a CPU. */
static __always_inline int send_sleep(struct runnable_wait *late)
{
	u64 size = sizeof(*late) - WINDOW_INTERVALS * sizeof(struct interval);
	struct account *account = account_of(late->cpu);

	late->window.count = 0;
	late->window.cpu = late->cpu;
	late->window.merged_end_ns = 0;
	late->window.since_ns = late->running_ns;
	late->window.end_ns = late->running_ns;
	if (account)
		take_from_budget(account, 0, late->running_ns);
	send_explained(&runnable_waits, late, size, late->off_ns);
	return 0;
}

/* Sends the record with its window. */
static __noinline int send_runnable_wait(struct runnable_wait *late)
{
	u32 count;
	u64 size;

	if (!late)
		return 0;
	/* Before it was moved it waited for another CPU. */
	count = copy_window(&late->window, late->moves.last_ns ? late->moves.last_ns : late->runnable_ns, late->running_ns);
	if (count > WINDOW_INTERVALS)
		count = WINDOW_INTERVALS;
	size = sizeof(*late) - (WINDOW_INTERVALS - count) * sizeof(struct interval);
	if (size > sizeof(*late))
		return 0;
	send_explained(&runnable_waits, late, size, since(late->running_ns, late->runnable_ns));
	return 0;
}
