/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Threads that were stopped, whatever they were doing. */
#pragma once

#include <bpf/bpf_core_read.h>

/* Bits of task_struct.__state (include/linux/sched.h). */
enum {
	TASK_INTERRUPTIBLE = 0x1,
	TASK_STOPPED = 0x4,
	TASK_TRACED = 0x8,
	/* Freezer of cgroups v1 and suspend, 6.1. A blocked thread gets it without waking. */
	TASK_FROZEN = 0x8000,
};

/* What has stopped a thread. */
enum stopper {
	STOPPED_NOT,
	STOPPED_BY_SIGNAL,
	STOPPED_BY_TRACER,
	STOPPED_BY_FREEZER,
};

/*
 * In a frozen cgroup of v2 a thread sleeps interruptibly, with the `frozen` flag (do_freezer_trap()). A stopped thread has
 * the flag too, and so has the parent of a vfork, which sleeps uninterruptibly.
 */
static __always_inline enum stopper stopper_of(const struct task_struct *task, u32 state)
{
	if (state & TASK_STOPPED)
		return STOPPED_BY_SIGNAL;
	if (state & TASK_TRACED)
		return STOPPED_BY_TRACER;
	if (state & TASK_FROZEN)
		return STOPPED_BY_FREEZER;
	if (state & TASK_INTERRUPTIBLE && bpf_core_field_exists(task->frozen) && BPF_CORE_READ_BITFIELD(task, frozen))
		return STOPPED_BY_FREEZER;
	return STOPPED_NOT;
}
