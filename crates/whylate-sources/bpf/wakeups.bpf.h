/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Last wakeup or preemption of each thread, and moves since: direct-mapped by TID, so threads may collide. */
#pragma once

#include "occupancy.bpf.h"

enum wakeup_limits {
	WORKERS = 1 << 13,
	OTHER_THREADS = 1 << 15,
	WAKEUPS = WORKERS + OTHER_THREADS,
	/* First ones of several moves. */
	FIRST_MOVES = 1 << 12,
};

struct wakeup {
	/* For a worker; 0: not seen. */
	u64 woken_ns;
	/* Start of its current or last run-queue wait: its wakeup, or its preemption. */
	u64 waits_since_ns;
	/* Of the last move to another CPU; 0: not moved since. */
	u64 moved_ns;
	/* Its switch count then: if it is higher, that wait is over. */
	u32 switches;
	/* Start time in units of 1,024 ns: TIDs are reused. */
	u32 born_us;
	u32 tid;
	u16 moved_from;
	/* enum stopper that had stopped it until it was woken. */
	u8 stopper;
	/* Number of moves during the wait, if it was_moved(); at most 255. */
	u8 moves;
	/* TID of the waker in whylate's PID namespace; 0 if an interrupt woke it, or it was not blocked. */
	u32 waker_tid;
	/* enum throttled_by, when it was switched out or woken. */
	u8 throttled_by;
	/* enum entry_kind */
	u8 entry;
	u16 waker_cpu;
	union {
		char waker[16];
		/* For ENTRY_DISK. */
		u32 completed;
		/* For ENTRY_TIMER: result of known_timer(). */
		u32 timer;
	};
};
_Static_assert(sizeof(struct wakeup) == 64, "a wakeup takes more than one cache line");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	/* User space sets it to WAKEUPS if causes are wanted. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct wakeup);
} wakeup_by_tid SEC(".maps");

/* Whether it was moved to another CPU's run queue while it waited. */
static __always_inline bool was_moved(const struct wakeup *wakeup)
{
	return wakeup->moved_ns && wakeup->moved_ns >= wakeup->waits_since_ns;
}

/* The first of several moves during a wait. */
struct first_move {
	u64 waits_since_ns;
	u64 at_ns;
	u32 tid;
	u32 from_cpu;
};

/* Direct-mapped by TID; written at the second move of a wait. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	/* User space sets it to FIRST_MOVES if causes are wanted. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct first_move);
} first_move_by_tid SEC(".maps");

static __always_inline struct first_move *first_move_of(u32 tid)
{
	u32 index = tid & (FIRST_MOVES - 1);

	return bpf_map_lookup_elem(&first_move_by_tid, &index);
}

static __always_inline void copy_moves(struct moves *moves, const struct wakeup *wakeup)
{
	const struct first_move *first;

	__builtin_memset(moves, 0, sizeof(*moves));
	if (!was_moved(wakeup))
		return;
	moves->last_ns = wakeup->moved_ns;
	moves->last_from = wakeup->moved_from;
	moves->count = wakeup->moves;
	if (moves->count < 2)
		return;
	first = first_move_of(wakeup->tid);
	if (!first || first->tid != wakeup->tid || first->waits_since_ns != wakeup->waits_since_ns)
		return;
	moves->first_ns = first->at_ns;
	moves->first_from = first->from_cpu;
}

/* Records that the waiting thread leaves the run queue of `from_cpu`. */
static __always_inline void keep_move(struct wakeup *wakeup, u32 from_cpu, u64 now_ns)
{
	struct first_move *first;

	if (!was_moved(wakeup)) {
		wakeup->moves = 1;
	} else {
		first = wakeup->moves == 1 ? first_move_of(wakeup->tid) : NULL;
		if (first) {
			/* Another CPU may read it, or write it for another thread, concurrently. */
			first->tid = 0;
			barrier();
			first->waits_since_ns = wakeup->waits_since_ns;
			first->at_ns = wakeup->moved_ns;
			first->from_cpu = wakeup->moved_from;
			barrier();
			first->tid = wakeup->tid;
		}
		if (wakeup->moves < 255)
			wakeup->moves++;
	}
	wakeup->moved_from = from_cpu;
	wakeup->moved_ns = now_ns;
}

static __always_inline u32 switches_before(const struct task_struct *task)
{
	return task->nvcsw + task->nivcsw;
}

static __always_inline u32 born_us(const struct task_struct *task)
{
	return task->start_time >> 10;
}

/* Workers have entries of their own: other threads are many. */
static __always_inline struct wakeup *wakeup_of(u32 tid, bool is_worker)
{
	u32 index = is_worker ? tid & (WORKERS - 1) : WORKERS + (tid & (OTHER_THREADS - 1));

	return bpf_map_lookup_elem(&wakeup_by_tid, &index);
}
