/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Since when threads wait for a CPU, and who woke them. */
#pragma once

#include "keep_account.bpf.h"
#include "throttling.bpf.h"
#include "wakeups.bpf.h"

/* Wakeups of all threads are kept, and not of workers alone. */
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
	return wakeup->tid == (u32)task->pid && wakeup->waits_since_ns && wakeup->switches == switches_before(task) &&
	       wakeup->born_us == born_us(task);
}

/*
 * From now on it waits for a CPU; `now_ns` is 0 where the scheduler's stamp will tell since when. `waker` is whoever
 * has woken it; NULL where it was not asleep, or an interrupt has.
 */
static __always_inline void keep_wait(const struct task_struct *task, bool was_asleep, const struct task_struct *waker, u64 now_ns)
{
	bool is_worker = task->flags & PF_WQ_WORKER, is_other;
	struct wakeup *wakeup = wakeup_of(task->pid, is_worker);

	if (!wakeup)
		return;
	/* It was preempted on its way to sleep: whoever wakes it now finds it in its queue. */
	if (was_asleep && !is_worker && is_waiting_still(task, wakeup)) {
		tell_waker(wakeup, waker);
		return;
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
	if (!is_worker)
		wakeup->run_delay_ns = task_run_delay_ns(task);
	wakeup->waits_since_ns = now_ns;
	wakeup->throttled_by = keeps_all_wakeups && !was_asleep ? throttled_by(task) : THROTTLED_NOT;
	wakeup->switches = switches_before(task);
	wakeup->born_us = born_us(task);
	tell_waker(wakeup, waker);
	barrier();
	wakeup->tid = task->pid;
}

/* Who wakes a thread is not whom an interrupt has interrupted. */
static __always_inline const struct task_struct *waker_here(void)
{
	const struct account *account = account_of(bpf_get_smp_processor_id());

	return account && !account->in_irq && !account->softirq ? bpf_get_current_task_btf() : NULL;
}
