/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Which threads the blocked threads wait for, from the owner words of the kernel's locks. Other threads keep
 * running, so there are three walks: the first finds waits, the second confirms those that still have the same
 * holder, and the last reports both sides. A lock names its owner by address only; the owner's fields are read when the
 * last walk visits it, so that no memory of an exited thread is read.
 */
#pragma once

#include "lock_owner.bpf.h"

enum holders_walk {
	HOLDERS_FIND,
	HOLDERS_CONFIRM,
	HOLDERS_REPORT,
};

enum holders_limits {
	/* Waiters and holders. */
	HOLDERS = 65536,
	BARRIERS = 8,
};

struct holder_now {
	/* Addresses of task_structs, as IDs of threads. `holder` is 0 if the thread waits for no known holder. */
	u64 thread;
	u64 holder;
	/* Function of the work item that is waited for, and of the one that this thread runs. */
	u64 flushed;
	u64 handler;
	/* Time off CPU; 0: the thread is on a CPU. */
	u64 off_cpu_ns;
	/* enum lock_kind of what the thread waits for. */
	u32 kind;
	/* TID in whylate's PID namespace, and in the first one. */
	u32 shown;
	u32 tid;
	u32 state;
	s32 syscall;
	u8 is_kernel;
	/* The thread has not run since the last walk, so the walk captured the stack of this wait. */
	u8 is_as_walked;
	u8 unused[2];
	char comm[16];
};

struct {
	struct holder_now holder_now;
	enum lock_kind lock_kind;
	enum holders_walk holders_walk;
	enum holders_limits holders_limits;
} holder_layouts = {};

/* wq_barrier_func(); 0: threads that flush a work item are not found. */
const volatile u64 barrier_function = 0;
u32 holders_walk = 0;

/* By the thread's address. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, HOLDERS);
	__type(key, u64);
	__type(value, struct wait_for);
} wait_by_thread SEC(".maps");

static __always_inline void keep_wait(u64 thread, const struct wait_for *wait)
{
	struct wait_for *known, none = {};

	if (holders_walk == HOLDERS_FIND) {
		if (bpf_map_update_elem(&wait_by_thread, &thread, wait, BPF_ANY)) {
			lose(LOST_HOLDERS);
			return;
		}
		thread = wait->holder;
		known = bpf_map_lookup_elem(&wait_by_thread, &thread);
		if (!known && bpf_map_update_elem(&wait_by_thread, &thread, &none, BPF_NOEXIST))
			lose(LOST_HOLDERS);
		return;
	}
	known = bpf_map_lookup_elem(&wait_by_thread, &thread);
	if (known && known->kind == wait->kind && known->lock == wait->lock && known->holder == wait->holder &&
	    known->switches == wait->switches)
		known->is_confirmed = true;
}

/* flush_work() queues a barrier behind the item that a worker runs; the barrier is on the stack of the flushing thread. */
static __always_inline void read_barriers(const struct task_struct *task)
{
	const struct worker *worker = worker_of(task);
	const struct list_head *all = (const void *)worker + bpf_core_field_offset(struct worker, scheduled);
	const struct list_head *entry = BPF_CORE_READ(worker, scheduled.next);
	u64 handler = (u64)BPF_CORE_READ(worker, current_func);

	if (!barrier_function || !handler || handler == barrier_function || !bpf_core_type_exists(struct wq_barrier))
		return;
	for (u32 i = 0; i < BARRIERS && entry && entry != all; i++) {
		const struct work_struct *work = (const void *)entry - bpf_core_field_offset(struct work_struct, entry);
		const struct wq_barrier *barrier = (const void *)work - bpf_core_field_offset(struct wq_barrier, work);

		if ((u64)BPF_CORE_READ(work, func) == barrier_function) {
			const struct task_struct *flusher = BPF_CORE_READ(barrier, task);
			struct wait_for wait = { .lock = handler, .holder = (u64)task, .kind = LOCK_WORK_ITEM };

			wait.switches = BPF_CORE_READ(flusher, nvcsw) + BPF_CORE_READ(flusher, nivcsw);
			keep_wait((u64)flusher, &wait);
		}
		entry = BPF_CORE_READ(entry, next);
	}
}

static __always_inline bool is_blocked(const struct task_struct *task)
{
	return !task->on_cpu && task->__state & ~TASK_WAKING;
}

static __always_inline void report_holder(struct task_struct *task, struct bpf_iter__task *ctx)
{
	u64 thread = (u64)task, now_ns = bpf_ktime_get_ns();
	struct holder_now now = {};
	struct thread_record *record;
	struct wait_for *wait;

	wait = bpf_map_lookup_elem(&wait_by_thread, &thread);
	if (!wait || task->exit_state)
		return;
	now.thread = thread;
	if (wait->is_confirmed && wait->switches == switches_of(task) && is_blocked(task)) {
		now.holder = wait->holder;
		now.kind = wait->kind;
		if (now.kind == LOCK_WORK_ITEM)
			now.flushed = wait->lock;
		record = record_of(task);
		now.is_as_walked = record && record->is_known && record->switches == wait->switches;
	}
	now.state = state_of(task);
	if (now.state != STATE_ON_CPU) {
		now.off_cpu_ns = now_ns - since_of(task, task->start_time, now_ns);
		if (!now.off_cpu_ns)
			now.off_cpu_ns = 1;
	}
	now.shown = shown_number(task);
	now.tid = task->pid;
	now.is_kernel = (task->flags & PF_KTHREAD) != 0;
	now.syscall = now.is_kernel ? -1 : syscall_of(task);
	if (task->flags & PF_WQ_WORKER)
		now.handler = handler_of_worker(task);
	BPF_CORE_READ_STR_INTO(&now.comm, task, comm);
	bpf_seq_write(ctx->meta->seq, &now, sizeof(now));
}

/* 0.2 us per thread and walk. Lock words are read only for threads that are off CPU and not runnable. */
SEC("iter/task")
int on_each_thread_tell_holder(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct wait_for wait = {};

	if (!task)
		return 0;
	if (holders_walk == HOLDERS_REPORT) {
		report_holder(task, ctx);
		return 0;
	}
	if (task->flags & PF_WQ_WORKER)
		read_barriers(task);
	if (task->exit_state || task->tgid == own_tgid || !is_blocked(task))
		return 0;
	wait.switches = switches_of(task);
	if (!read_lock(task, &wait))
		return 0;
	/* The thread itself took it last, so it was released: no thread waits for itself this way. */
	if (wait.holder == (u64)task && (wait.kind == LOCK_SEMAPHORE || wait.kind == LOCK_RWSEM_READERS))
		return 0;
	keep_wait((u64)task, &wait);
	return 0;
}
