// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * What io_uring's submission threads do with their time. No lock of a ring is taken, and nothing of a ring is written.
 *
 * A thread loops: it submits what its rings hold, runs completions, and starts over or sleeps. Its on-CPU time is work in a round that
 * found something to do, else spinning. There are three ways to distinguish them:
 * - by tracepoints (6.9): one at the end of each round and one at each request;
 * - by the entry and exit of functions that the thread calls only if there is something to do;
 * - by samples of whether the thread is in one of these functions.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "compat.bpf.h"
#include "lost.bpf.h"
#include "ways.bpf.h"
#include "registers.bpf.h"
#include "occupancy.bpf.h"
#include "steps.bpf.h"
#include "window.bpf.h"
#include "pid_namespace.bpf.h"
#include "throttling.bpf.h"
#include "sq_thread.bpf.h"
#include "sample.bpf.h"
#include "runnable.bpf.h"
#include "look.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* A thread that never ran was not woken, and has not slept either. */
static __always_inline bool is_new(const struct task_struct *task)
{
	return bpf_core_field_exists(task->sched_info.last_arrival) && !task->sched_info.last_arrival;
}

static __always_inline void explain_wait(const struct sq_thread *thread, struct task_struct *task, u64 waited_ns, u64 now_ns)
{
	struct runnable_wait *late;

	waited_ns = without_sleep(thread, waited_ns, now_ns);
	if (waited_ns < explain_over_ns)
		return;
	if (!thread->waits_since_ns && !is_new(task)) {
		lose(SQ_LOST_WAKEUPS);
		return;
	}
	late = begin_runnable_wait(task, since(now_ns, waited_ns), now_ns);
	if (!late)
		return;
	tell_limits(&late->limits, task, late->runnable_ns, now_ns, thread->throttled_by);
	send_runnable_wait(late);
}

/* `prev_state` is the sleep state of the previous thread, or 0. */
static __always_inline void switch_threads(struct task_struct *prev, struct task_struct *next, u32 prev_state)
{
	struct sq_thread *thread;
	u64 now_ns, waited_ns;

	if (!((prev->flags | next->flags) & PF_IO_WORKER))
		return;
	now_ns = bpf_ktime_get_ns();
	thread = enrolled(prev, now_ns);
	if (thread) {
		thread->throttled_by = prev_state ? THROTTLED_NOT : throttled_by(prev);
		switch_out(thread, now_ns, prev_state);
	}
	thread = enrolled(next, now_ns);
	if (!thread)
		return;
	/* The scheduler has just read its clock, and counts the wait by the same reading after this. */
	waited_ns = task_waiting_ns(next);
	if (explain_over_ns && thread->own_tid)
		explain_wait(thread, next, waited_ns, now_ns);
	switch_in(thread, next, prev, waited_ns, now_ns);
}

SEC("tp_btf/sched_switch")
int BPF_PROG(on_sched_switch, bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state)
{
	switch_threads(prev, next, preempt ? 0 : prev_state);
	go_on_with_account(ctx);
	return 0;
}

/* The application wakes its sleeping thread (io_uring_enter(2)). Completions wake threads, too. */
SEC("tp_btf/sched_waking")
int BPF_PROG(on_sched_waking, struct task_struct *woken)
{
	struct sq_thread *thread;

	if (!(woken->flags & PF_IO_WORKER))
		return 0;
	thread = known_thread(woken);
	if (!thread)
		return 0;
	thread->waits_since_ns = bpf_ktime_get_ns();
	thread->throttled_by = throttled_by_when_woken(woken, woken->thread_info.cpu);
	if (asks_to_wake_sq_thread(bpf_get_current_task_btf()))
		__sync_fetch_and_add(&thread->wakeups, 1);
	return 0;
}

SEC("tp_btf/sched_process_exit")
int BPF_PROG(on_sched_process_exit, struct task_struct *task)
{
	struct sq_thread *thread;

	if (!(task->flags & PF_IO_WORKER))
		return 0;
	thread = known_thread(task);
	if (thread)
		end_thread(thread, task, bpf_ktime_get_ns());
	return 0;
}

/* A request is taken from a ring, by the ring's thread or by a caller of io_uring_enter(). */
SEC("?tp_btf/io_uring_submit_req")
int BPF_PROG(on_io_uring_submit_req, struct io_kiocb *req)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct sq_thread *thread;
	u64 now_ns;

	if (!(task->flags & PF_IO_WORKER))
		return 0;
	if (by_samples)
		return count_request(task);
	thread = known_thread(task);
	/* The first request of a round. The time before it is spinning, maybe long if a hypervisor preempted the vCPU. */
	if (!thread || !thread->has_work) {
		now_ns = bpf_ktime_get_ns();
		thread = enrolled(task, now_ns);
		if (!thread)
			return 0;
		begin_change(thread);
		close_round(thread, now_ns);
		thread->has_work = true;
		end_change(thread);
	}
	begin_change(thread);
	thread->submitted++;
	if (BPF_CORE_READ(req, ctx, flags) & IORING_SETUP_IOPOLL)
		thread->polled_ring = (u64)BPF_CORE_READ(req, ctx);
	end_change(thread);
	return 0;
}

/* Like io_uring_submit_req, before 6.3. */
SEC("?tp_btf/io_uring_submit_sqe")
int BPF_PROG(on_io_uring_submit_sqe)
{
	return count_request(bpf_get_current_task_btf());
}

/* A timer that runs while the thread is on-CPU: its time since the last sample counts as what it does now. */
SEC("?perf_event")
int on_sample(void *ctx)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct sq_thread *thread;
	bool has_work;
	u64 now_ns;

	if (!(task->flags & PF_IO_WORKER))
		return 0;
	now_ns = bpf_ktime_get_ns();
	thread = enrolled(task, now_ns);
	if (!thread || !read_stack(ctx, &has_work))
		return 0;
	begin_change(thread);
	thread->has_work = has_work;
	close_round(thread, now_ns);
	end_change(thread);
	return 0;
}

/* The end of a round (6.9). `count` is the number of completions run in it. */
SEC("?tp_btf/io_uring_task_work_run")
int BPF_PROG(on_io_uring_task_work_run, void *tctx, unsigned int count)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct sq_thread *thread;
	u64 now_ns;

	if (!(task->flags & PF_IO_WORKER))
		return 0;
	now_ns = bpf_ktime_get_ns();
	thread = enrolled(task, now_ns);
	if (!thread)
		return 0;
	begin_change(thread);
	if (count || polls_for_requests(thread, task))
		thread->has_work = true;
	close_round(thread, now_ns);
	thread->has_work = false;
	end_change(thread);
	return 0;
}

/*
 * Nested work, such as a completion that submits, belongs to the outer one. `frame` is the stack address of the call's arguments: the same
 * at its entry and exit, lower in calls within it. A program does not run if it was called while it was preempted on the same CPU: a call
 * with an unseen exit ends when another one starts or ends at the same or a shallower depth.
 */
static __always_inline int enter_work(u64 frame)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct sq_thread *thread;
	u64 now_ns;

	if (!(task->flags & PF_IO_WORKER))
		return 0;
	now_ns = bpf_ktime_get_ns();
	thread = enrolled(task, now_ns);
	if (!thread)
		return 0;
	begin_change(thread);
	if (frame >= thread->work_frame) {
		if (thread->work_frame)
			lose(SQ_LOST_EXITS);
		close_round(thread, now_ns);
		thread->has_work = true;
		thread->work_frame = frame;
	}
	end_change(thread);
	return 0;
}

static __always_inline int leave_work(u64 frame, s64 submitted)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct sq_thread *thread;
	u64 now_ns;

	if (!(task->flags & PF_IO_WORKER))
		return 0;
	now_ns = bpf_ktime_get_ns();
	thread = known_thread(task);
	if (!thread)
		return 0;
	begin_change(thread);
	if (submitted > 0)
		thread->submitted += submitted;
	/* If the call started before the programs were attached, or before the thread was known, nothing is counted. */
	if (frame >= thread->work_frame) {
		close_round(thread, now_ns);
		thread->has_work = false;
		thread->work_frame = 0;
	}
	end_change(thread);
	return 0;
}

SEC("?fexit/io_submit_sqes")
int BPF_PROG(on_io_submit_sqes_exit, struct io_ring_ctx *ring, unsigned int nr, int submitted)
{
	return leave_work((u64)ctx, submitted);
}

/* Calls of this function are work. */
#define WORK_BEGINS_IN(function)                \
	SEC("?fentry/" #function)               \
	int BPF_PROG(on_##function)             \
	{                                       \
		return enter_work((u64)ctx);    \
	}

/* It ends without submissions. */
#define WORK_ENDS_IN(function)                  \
	SEC("?fexit/" #function)                \
	int BPF_PROG(on_##function##_exit)      \
	{                                       \
		return leave_work((u64)ctx, 0); \
	}

WORK_BEGINS_IN(io_submit_sqes)
WORK_BEGINS_IN(io_do_iopoll)
WORK_ENDS_IN(io_do_iopoll)
/* Completions, since 6.9. */
WORK_BEGINS_IN(io_handle_tw_list)
WORK_ENDS_IN(io_handle_tw_list)
/* Completions, before 6.9. */
WORK_BEGINS_IN(tctx_task_work)
WORK_ENDS_IN(tctx_task_work)
