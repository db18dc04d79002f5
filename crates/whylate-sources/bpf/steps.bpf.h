/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Programs of several sources at one event. If there is a CPU account, only its program is attached, and calls that of a
 * source only for what concerns it: an event that concerns no source costs one program. A source's program is called
 * before the account records the switch, so it finds the previous occupant.
 */
#pragma once

enum switch_step {
	STEP_TIMERLAT,
	STEP_SQPOLL,
	STEP_RUNNABLE,
	/* Number of sources with programs there. */
	STEPS_OF_SOURCES,
	/* The account's own program continues. */
	STEP_ACCOUNT = STEPS_OF_SOURCES,
	SWITCH_STEPS,
};

enum waking_step {
	WAKING_STEP_SQPOLL,
	WAKING_STEPS,
};

/* At interrupts not raised by devices. */
enum vector_step {
	VECTOR_STEP_ENTRY,
	VECTOR_STEP_EXIT,
	VECTOR_STEPS,
};

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, SWITCH_STEPS);
	__type(key, u32);
	__type(value, u32);
} steps_of_switch SEC(".maps");

/* The account's program calls those of this source at switches and wakeups; they are not attached themselves. */
const volatile bool is_called_by_account = false;

/* Last call of a source's program at a switch. Does not return if the account has called the program. */
static __always_inline void go_on_with_account(void *ctx)
{
	if (is_called_by_account)
		bpf_tail_call(ctx, &steps_of_switch, STEP_ACCOUNT);
}
