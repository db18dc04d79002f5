/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Start of each thread's wait for a CPU, and its waker. */
#pragma once

#include "keep_account.bpf.h"
#include "throttling.bpf.h"
#include "wakeups.bpf.h"

/* Record wakeups of all threads, not only of workers, with their wakers and how each thread left its CPU. */
const volatile bool keeps_all_wakeups = false;

static __always_inline void set_waker(struct wakeup *wakeup, const struct task_struct *waker)
{
	wakeup->waker_tid = waker ? shown_number(waker) : 0;
	if (waker)
		read_name(wakeup->waker, waker);
}

/* Tests whether the thread was preempted and has not run since. */
static __always_inline bool is_waiting_still(const struct task_struct *task, const struct wakeup *wakeup)
{
	return wakeup->tid == (u32)task->pid && wakeup->entry == ENTRY_PREEMPTED && wakeup->switches == switches_before(task) &&
	       wakeup->born_us == born_us(task);
}

static __always_inline u32 throttled_by_now(const struct task_struct *task, bool was_asleep)
{
	if (!keeps_all_wakeups)
		return THROTTLED_NOT;
	return was_asleep ? throttled_by_when_woken(task, task->thread_info.cpu) : throttled_by(task);
}

/*
 * Records that the thread waits for a CPU from now on. `waker` is NULL if the thread was not asleep or an interrupt woke it. Returns the
 * record; NULL if the thread was waiting for a CPU already.
 */
static __always_inline struct wakeup *keep_wait(const struct task_struct *task, bool was_asleep, const struct task_struct *waker, u64 now_ns)
{
	bool is_worker = task->flags & PF_WQ_WORKER, is_other, waits_still;
	struct wakeup *wakeup = wakeup_of(task->pid, is_worker);

	if (!wakeup)
		return NULL;
	waits_still = was_asleep && is_waiting_still(task, wakeup);
	/* It was preempted before it could sleep: the waker finds it on the run queue. */
	if (waits_still && !is_worker) {
		set_waker(wakeup, waker);
		return NULL;
	}
	is_other = wakeup->tid != (u32)task->pid;
	/* Another CPU may read the entry concurrently. */
	wakeup->tid = 0;
	barrier();
	if (is_other || was_asleep) {
		wakeup->moved_ns = 0;
		if (is_worker)
			wakeup->woken_ns = was_asleep ? now_ns : 0;
	}
	wakeup->entry = was_asleep && !waits_still ? ENTRY_UNSEEN : ENTRY_PREEMPTED;
	wakeup->waits_since_ns = now_ns;
	wakeup->throttled_by = throttled_by_now(task, was_asleep);
	wakeup->switches = switches_before(task);
	wakeup->born_us = born_us(task);
	set_waker(wakeup, waker);
	barrier();
	wakeup->tid = task->pid;
	return waits_still ? NULL : wakeup;
}
