/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Since when threads wait for a CPU, and who woke them. */
#pragma once

#include "keep_account.bpf.h"
#include "throttling.bpf.h"
#include "wakeups.bpf.h"

/* Wakeups of all threads are kept, and not of workers alone, with whoever woke them and how each left its CPU. */
const volatile bool keeps_all_wakeups = false;

static __always_inline void tell_waker(struct wakeup *wakeup, const struct task_struct *waker)
{
	wakeup->waker_tid = waker ? shown_number(waker) : 0;
	if (waker)
		read_name(wakeup->waker, waker);
}

/* Whether it has lost its CPU without falling asleep, and has had none since. */
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
 * From now on it waits for a CPU. `waker` is whoever has woken it; NULL where it was not asleep, or an interrupt has.
 * Returns what is kept of it; NULL where it waits for a CPU all the while.
 */
static __always_inline struct wakeup *keep_wait(const struct task_struct *task, bool was_asleep, const struct task_struct *waker, u64 now_ns)
{
	bool is_worker = task->flags & PF_WQ_WORKER, is_other, waits_still;
	struct wakeup *wakeup = wakeup_of(task->pid, is_worker);

	if (!wakeup)
		return NULL;
	waits_still = was_asleep && is_waiting_still(task, wakeup);
	/* It was preempted on its way to sleep: whoever wakes it now finds it in its queue. */
	if (waits_still && !is_worker) {
		tell_waker(wakeup, waker);
		return NULL;
	}
	is_other = wakeup->tid != (u32)task->pid;
	/* Another CPU may read it meanwhile. */
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
	tell_waker(wakeup, waker);
	barrier();
	wakeup->tid = task->pid;
	return waits_still ? NULL : wakeup;
}
