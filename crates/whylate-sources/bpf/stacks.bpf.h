/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Kernel stacks captured by programs. */
#pragma once

enum {
	TAKEN_FRAMES = 48,
};

struct stack_taken {
	/* Negative or 0: none. */
	s64 bytes;
	u64 frames[TAKEN_FRAMES];
};
