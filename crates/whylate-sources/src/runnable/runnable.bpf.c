// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Threads with a long run-queue wait, each with the occupants of its CPU during the wait. */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>
#include "compat.bpf.h"
#include "ways.bpf.h"
#include "occupancy.bpf.h"
#include "wakeups.bpf.h"
#include "steps.bpf.h"
#include "stopped.bpf.h"
#include "runnable.bpf.h"
#include "wanted_threads.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Never holds data: puts the types that user space shares into the skeleton. */
struct {
	struct runnable_wait runnable_wait;
	enum thread_role thread_role;
	enum throttled_by throttled_by;
	enum stopper stopper;
	enum entry_kind entry_kind;
} layouts = {};

enum {
	/* include/linux/sched.h */
	PF_KTHREAD = 0x200000,
};

/* PID in the initial namespace; 0: all. */
const volatile u32 wanted_process = 0;
/* Waits of whylate itself are not explained. */
const volatile u32 own_process = 0;
/* Minimum length of blocked waits that are explained, in nanoseconds; 0: none. */
const volatile u64 explain_sleeps_over_ns = 0;
/* Explain only blocked waits that may have been held up here: a wait ended by a timer or a packet was not. */
const volatile bool explain_held_up_alone = false;

/* Late waits with an unseen start. */
u64 lost_wakeups = 0;
/* Blocked waits that came too fast. */
u64 lost_sleeps = 0;

/* Tests whether the thread was blocked, and its waker is relevant. */
static __always_inline bool has_slept(const struct wakeup *wakeup)
{
	if (!wakeup || wakeup->entry <= ENTRY_PREEMPTED || wakeup->entry == ENTRY_PARENT || wakeup->entry == ENTRY_PARENT_OF_THREAD)
		return false;
	return !explain_held_up_alone || wakeup->entry == ENTRY_THREAD || wakeup->entry == ENTRY_DISK;
}

/* Most of these waits are innocent, so they are dropped if they are many, to leave space for late ones. */
static __always_inline bool may_be_held_up(u64 now_ns)
{
	u64 used = bpf_ringbuf_query(&runnable_waits, BPF_RB_AVAIL_DATA);

	if (used <= bpf_ringbuf_query(&runnable_waits, BPF_RB_RING_SIZE) / 2 && has_budget(now_ns))
		return true;
	__sync_fetch_and_add(&lost_sleeps, 1);
	return false;
}

static __always_inline void record_sleep(struct runnable_wait *late, struct task_struct *task, const struct wakeup *wakeup)
{
	long bytes = bpf_get_task_stack(task, late->slept_in, sizeof(late->slept_in), 0);

	late->frames = bytes > 0 ? bytes / sizeof(u64) : 0;
	late->woken_ns = wakeup->waits_since_ns;
	late->off_ns = task_off_cpu_ns(task);
	late->stopper = wakeup->stopper;
	late->ended_by = wakeup->entry;
	/* The thread clears that itself once it runs. */
	late->in_iowait = BPF_CORE_READ_BITFIELD(task, in_iowait);
}

/* Sends a long blocked wait: user space follows the wakers backwards. */
static __always_inline int explain_sleep(struct task_struct *task, const struct wakeup *wakeup, u64 now_ns)
{
	struct runnable_wait *late;

	if (!is_wanted(task, task->flags & PF_KTHREAD) || !own_number(task))
		return 0;
	if (explain_held_up_alone && !may_be_held_up(now_ns))
		return 0;
	late = begin_runnable_wait(task, since(now_ns, task_off_cpu_ns(task)), now_ns);
	if (!late)
		return 0;
	late->runnable_ns = wakeup->waits_since_ns;
	record_sleep(late, task, wakeup);
	tell_limits(&late->limits, task, late->runnable_ns, now_ns, wakeup->throttled_by);
	return send_sleep(late);
}

static __always_inline int explain_wait(struct task_struct *task, const struct wakeup *wakeup, u64 waited_ns, u64 now_ns)
{
	struct runnable_wait *late;

	if (!is_wanted(task, task->flags & PF_KTHREAD) || !own_number(task))
		return 0;
	late = begin_runnable_wait(task, since(now_ns, waited_ns), now_ns);
	if (!late)
		return 0;
	if (wakeup) {
		if (was_moved(wakeup)) {
			late->runnable_ns = wakeup->waits_since_ns;
			copy_moves(&late->moves, wakeup);
		}
		late->waker_tid = wakeup->waker_tid;
		__builtin_memcpy(late->waker, wakeup->waker, sizeof(late->waker));
	}
	if (explain_sleeps_over_ns && has_slept(wakeup))
		record_sleep(late, task, wakeup);
	tell_limits(&late->limits, task, late->runnable_ns, now_ns, wakeup ? wakeup->throttled_by : THROTTLED_NOT);
	return send_runnable_wait(late);
}

/*
 * Returns the record of the wait's start; NULL if unknown. The entry may be of an earlier thread with the same TID, or of an earlier wait
 * if the wakeup was not seen: the thread has left a CPU since then.
 */
static __always_inline const struct wakeup *own_wakeup(const struct task_struct *task)
{
	const struct wakeup *wakeup = wakeup_of(task->pid, task->flags & PF_WQ_WORKER);

	if (!wakeup || wakeup->tid != (u32)task->pid || wakeup->born_us != born_us(task))
		return NULL;
	return wakeup->switches == switches_before(task) ? wakeup : NULL;
}

/*
 * Returns the run-queue wait by the scheduler's stamp, which is that of its current queue; without one, or if the thread was migrated,
 * since its wakeup or preemption. A thread that slept on a run queue (delayed dequeue, 6.12) may have a stamp from before its wakeup: if
 * that was not seen, the wait is dropped, unless the thread never ran.
 */
static __always_inline u64 waited_ns_of(struct task_struct *task, const struct wakeup *wakeup, u64 now_ns)
{
	bool has_stamp = bpf_core_field_exists(task->sched_info.last_queued) && bpf_core_field_exists(task->se.cfs_rq);
	u64 waited_ns = task_waiting_ns(task), whole_ns;

	if (!wakeup) {
		if (!has_stamp || !task->sched_info.last_arrival)
			return waited_ns;
		if (waited_ns >= explain_over_ns)
			__sync_fetch_and_add(&lost_wakeups, 1);
		return 0;
	}
	whole_ns = since(now_ns, wakeup->waits_since_ns);
	/* A thread that was preempted before it could sleep, in a sleep state, has none. */
	if (!has_stamp || !task->sched_info.last_queued)
		return whole_ns;
	return was_moved(wakeup) || whole_ns < waited_ns ? whole_ns : waited_ns;
}

static __noinline int check_wait(struct task_struct *task)
{
	u64 now_ns = bpf_ktime_get_ns(), waited_ns;
	const struct wakeup *wakeup;

	if (!task)
		return 0;
	wakeup = own_wakeup(task);
	waited_ns = waited_ns_of(task, wakeup, now_ns);
	if (waited_ns >= explain_over_ns)
		explain_wait(task, wakeup, waited_ns, now_ns);
	else if (explain_sleeps_over_ns && has_slept(wakeup) && task_off_cpu_ns(task) >= explain_sleeps_over_ns)
		explain_sleep(task, wakeup, now_ns);
	return 0;
}

/* Called by the account if the thread was off-CPU for at least the threshold. */
SEC("tp_btf/sched_switch")
int BPF_PROG(on_sched_switch, bool preempt, struct task_struct *prev, struct task_struct *next)
{
	if ((u32)next->tgid != own_process && (!wanted_process || (u32)next->tgid == wanted_process))
		check_wait(next);
	go_on_with_account(ctx);
	return 0;
}
