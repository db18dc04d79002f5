/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Who did not let a thread go on when it lost its CPU, or was woken. */
#pragma once

#include "compat.bpf.h"

enum throttled_by {
	THROTTLED_NOT,
	/* A cgroup's quota of CPU time. */
	THROTTLED_BY_QUOTA,
	/* The limit of real-time threads. */
	THROTTLED_BY_REAL_TIME,
};

/* Of real-time threads that is not asked at a wakeup: it costs as much as all else there. */
static __always_inline u32 throttled_by(const struct task_struct *task, bool is_woken)
{
	if (is_throttled(task))
		return THROTTLED_BY_QUOTA;
	if (is_woken)
		return THROTTLED_NOT;
	return is_real_time_throttled(task) ? THROTTLED_BY_REAL_TIME : THROTTLED_NOT;
}
