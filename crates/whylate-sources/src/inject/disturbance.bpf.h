/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A disturbance of one CPU, measured from inside. */
#pragma once

#include "busy.bpf.h"

const volatile u64 length_ns = 0;
const volatile u32 cpu_to_disturb = 0;

/* The last disturbance, on CLOCK_MONOTONIC. */
struct made {
	/* 0 if nothing was disturbed. */
	u64 start_ns;
	u64 end_ns;
	/* CPU that the program ran on. It disturbs only cpu_to_disturb. */
	u32 cpu;
};

struct made made = {};

static __always_inline void disturb(void)
{
	u64 start_ns = 0, end_ns = 0;

	made.cpu = bpf_get_smp_processor_id();
	if (made.cpu == cpu_to_disturb && !stopping) {
		start_ns = bpf_ktime_get_ns();
		end_ns = keep_busy(start_ns, length_ns);
	}
	made.start_ns = start_ns;
	made.end_ns = end_ns;
}
