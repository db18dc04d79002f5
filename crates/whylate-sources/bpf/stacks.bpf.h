/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Stacks that programs take. */
#pragma once

enum {
	TAKEN_FRAMES = 48,
	/* How often a stack is taken anew that meets another one in a map, at most. */
	STACK_ATTEMPTS = 4,
};

enum {
	/* include/uapi/asm-generic/errno-base.h */
	MAP_HAS_ANOTHER = -17,
};

struct stack_taken {
	/* Negative or 0: none. */
	s64 bytes;
	u64 frames[TAKEN_FRAMES];
};

/*
 * Keeps the stack of a tracepoint's program in a map of stacks, and returns its number; negative where that fails. A
 * stack has but one place there, by its hash, which another may hold for good: of a thousand stacks in 8,192 places,
 * every 16th. Without its innermost frame, of the program itself or the tracepoint, it has another place.
 */
static __always_inline s32 keep_stack(void *context, void *stacks)
{
	s32 number = MAP_HAS_ANOTHER;

#pragma unroll
	for (u32 left_out = 0; left_out < STACK_ATTEMPTS; left_out++) {
		if (number == MAP_HAS_ANOTHER)
			number = bpf_get_stackid(context, stacks, left_out);
	}
	return number;
}
