/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Programs of several sources at one event. Where there is an account of the CPUs, its program alone comes in, and
 * calls that of a source only for what concerns it: an event that concerns nobody costs one program. A source's program
 * is called before the account hands the CPU over, so it finds who had it before.
 */
#pragma once

enum switch_step {
	STEP_TIMERLAT,
	STEP_SQPOLL,
	STEP_RUNNABLE,
	/* How many sources have programs there. */
	STEPS_OF_SOURCES,
	/* The account's own program goes on. */
	STEP_ACCOUNT = STEPS_OF_SOURCES,
	SWITCH_STEPS,
};

enum waking_step {
	WAKING_STEP_SQPOLL,
	WAKING_STEPS,
};

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, SWITCH_STEPS);
	__type(key, u32);
	__type(value, u32);
} steps_of_switch SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, WAKING_STEPS);
	__type(key, u32);
	__type(value, u32);
} steps_of_waking SEC(".maps");

/* The account's program calls those of this source at switches and wakeups; they are not attached themselves. */
const volatile bool is_called_by_account = false;

/* At the end of a source's program at a switch. It does not return where the account has called it. */
static __always_inline void go_on_with_account(void *ctx)
{
	if (is_called_by_account)
		bpf_tail_call(ctx, &steps_of_switch, STEP_ACCOUNT);
}
