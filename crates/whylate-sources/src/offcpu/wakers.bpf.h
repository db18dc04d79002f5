/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Wakers: the waker's stacks are captured in its own context, and kept in the wakee's record until its switch-in. The last
 * wakeup before the switch-in counts; it overwrites one that came while the thread was still about to block.
 */
#pragma once

#include "context.bpf.h"

/* Place of the current thread as a waker; WAKER_UNSEEN if there is no room. */
static __always_inline u32 waking_thread(struct task_struct *task, const void *arguments)
{
	struct place_key key = {};
	u32 place;

	key.is_kernel = (task->flags & PF_KTHREAD) != 0;
	key.process = process_of(task);
	if (!key.process) {
		lose(LOST_PROCESSES);
		return WAKER_UNSEEN;
	}
	key.tid = by_thread ? shown_number(task) : 0;
	key.state = STATE_WAKES;
	key.syscall = -1;
	BPF_CORE_READ_STR_INTO(&key.comm, task, comm);
	if (!take_stacks(task, arguments, AT_WAKING, &key)) {
		lose(LOST_STACKS);
		return WAKER_UNSEEN;
	}
	place = number_of_seen_place(&key);
	if (place == PLACES) {
		lose(LOST_PLACES);
		return WAKER_UNSEEN;
	}
	return WAKER_THREADS + place;
}

static __always_inline u32 waker_here(const void *arguments)
{
	struct task_struct *task = bpf_get_current_task_btf();

	if (!has_preempt_count(task))
		return WAKER_UNSEEN;
	/* A CPU that leaves idle handles what would have interrupted it otherwise. */
	return interrupts_here(task) || !task->pid ? (u32)WAKER_INTERRUPT : waking_thread(task, arguments);
}

/*
 * The wakee's pi_lock is held and interrupts are off: no other program on this CPU uses the scratch memory for stacks.
 * Not so when a thread wakes itself, which then does not block.
 */
SEC("?tp_btf/sched_waking")
int BPF_PROG(on_sched_waking, struct task_struct *woken)
{
	struct thread_record *record;

	if (!is_tracing || !is_traced(woken) || woken->pid == (s32)bpf_get_current_pid_tgid())
		return 0;
	record = bpf_task_storage_get(&record_by_thread, woken, 0, 0);
	/* A missing record is counted at the next switch-out. */
	if (!record || record->is_skipped)
		return 0;
	record->waker = waker_here(ctx);
	record->waker_generation = generation + 1;
	return 0;
}
