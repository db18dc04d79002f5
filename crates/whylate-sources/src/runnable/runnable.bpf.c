// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Threads that could run and had to wait for a CPU for long, each with who had it meanwhile. */
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

/* Nothing is ever in it: it puts the types that user space shares into the skeleton. */
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

/* By the kernel's number; 0: all. */
const volatile u32 wanted_process = 0;
/* Whoever watches is no victim. */
const volatile u32 own_process = 0;
/* Long waits for others are told too, from so many nanoseconds on; 0: they are not. */
const volatile u64 explain_sleeps_over_ns = 0;
/* Of these only what somebody may have held up: what a timer or a packet has ended was held up by nobody here. */
const volatile bool explain_held_up_alone = false;

/* Late waits whose beginning was not seen. */
u64 lost_wakeups = 0;
/* Long waits for others that came too fast. */
u64 lost_sleeps = 0;

/* It has slept, and something has woken it that is to be told. */
static __always_inline bool has_slept(const struct wakeup *wakeup)
{
	if (!wakeup || wakeup->entry <= ENTRY_PREEMPTED || wakeup->entry == ENTRY_PARENT || wakeup->entry == ENTRY_PARENT_OF_THREAD)
		return false;
	return !explain_held_up_alone || wakeup->entry == ENTRY_THREAD || wakeup->entry == ENTRY_DISK;
}

/* Most of these waits are nobody's fault, so they are not late if they are many, and leave room for what is. */
static __always_inline bool may_be_held_up(u64 now_ns)
{
	u64 used = bpf_ringbuf_query(&runnable_waits, BPF_RB_AVAIL_DATA);

	if (used <= bpf_ringbuf_query(&runnable_waits, BPF_RB_RING_SIZE) / 2 && has_budget(now_ns))
		return true;
	__sync_fetch_and_add(&lost_sleeps, 1);
	return false;
}

static __always_inline void tell_sleep(struct runnable_wait *late, struct task_struct *task, const struct wakeup *wakeup)
{
	long bytes = bpf_get_task_stack(task, late->slept_in, sizeof(late->slept_in), 0);

	late->frames = bytes > 0 ? bytes / sizeof(u64) : 0;
	late->woken_ns = wakeup->waits_since_ns;
	late->off_ns = task_off_cpu_ns(task);
	late->stopper = wakeup->stopper;
	late->ended_by = wakeup->entry;
	/* It takes that back itself, once it runs. */
	late->in_iowait = BPF_CORE_READ_BITFIELD(task, in_iowait);
}

/* A thread that was late for something else than a CPU: user space goes back along who has woken whom. */
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
	tell_sleep(late, task, wakeup);
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
			late->moved_ns = wakeup->moved_ns;
			late->moved_from = wakeup->moved_from;
		}
		late->waker_tid = wakeup->waker_tid;
		__builtin_memcpy(late->waker, wakeup->waker, sizeof(late->waker));
	}
	if (explain_sleeps_over_ns && has_slept(wakeup))
		tell_sleep(late, task, wakeup);
	tell_limits(&late->limits, task, late->runnable_ns, now_ns, wakeup ? wakeup->throttled_by : THROTTLED_NOT);
	return send_runnable_wait(late);
}

/*
 * How it came to wait; NULL where that is not known. An entry may be of a thread that had the same number, or of an
 * earlier wait, where the wakeup was not seen: it has left a CPU since then.
 */
static __always_inline const struct wakeup *own_wakeup(const struct task_struct *task)
{
	const struct wakeup *wakeup = wakeup_of(task->pid, task->flags & PF_WQ_WORKER);

	if (!wakeup || wakeup->tid != (u32)task->pid || wakeup->born_us != born_us(task))
		return NULL;
	return wakeup->switches == switches_before(task) ? wakeup : NULL;
}

/*
 * By the scheduler's stamp, which is of its present queue; without one, or where the thread was moved, from its wakeup
 * or loss of a CPU. One that slept in a queue (6.12) may have a stamp of before its wakeup: where that was not seen
 * nothing is told, unless the thread never had a CPU.
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
	/* One that was preempted on its way to sleep, in a state of sleep, has none. */
	if (!has_stamp || !task->sched_info.last_queued)
		return whole_ns;
	return was_moved(wakeup) || whole_ns < waited_ns ? whole_ns : waited_ns;
}

static __noinline int look_at_wait(struct task_struct *task)
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

/* Called by the account, where the thread has not had a CPU for as long as is late. */
SEC("tp_btf/sched_switch")
int BPF_PROG(on_sched_switch, bool preempt, struct task_struct *prev, struct task_struct *next)
{
	if ((u32)next->tgid != own_process && (!wanted_process || (u32)next->tgid == wanted_process))
		look_at_wait(next);
	go_on_with_account(ctx);
	return 0;
}
