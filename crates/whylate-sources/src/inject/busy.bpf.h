/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Keeps a CPU busy for a known time, in any context. */
#pragma once

/* Set by user space: busy code ends at once. In a map of its own, for a thread that has only that map. */
volatile u32 stopping SEC(".bss.stopping") = 0;

enum {
	/* The limit of bpf_loop(), enough for far more than the longest busy time: each round reads the clock. */
	BUSY_ROUNDS = 1 << 23,
};

struct busy {
	u64 until_ns;
	/* Last reading of the clock. */
	u64 now_ns;
};

static long is_busy_over(u32 round, struct busy *busy)
{
	busy->now_ns = bpf_ktime_get_ns();
	return stopping || busy->now_ns >= busy->until_ns;
}

/* Returns the end: the first reading of the clock at or after until_ns, unless it is stopped before. */
static __always_inline u64 keep_busy(u64 start_ns, u64 length_ns)
{
	struct busy busy = { .until_ns = start_ns + length_ns, .now_ns = start_ns };

	bpf_loop(BUSY_ROUNDS, is_busy_over, &busy, 0);
	return busy.now_ns;
}
