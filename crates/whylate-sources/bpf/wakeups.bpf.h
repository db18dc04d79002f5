/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Threads' last wakeups or losses of a CPU, and moves since: direct-mapped by id, so another may take an entry over. */
#pragma once

enum wakeup_limits {
	WORKERS = 1 << 13,
	OTHER_THREADS = 1 << 15,
	WAKEUPS = WORKERS + OTHER_THREADS,
};

struct wakeup {
	/* Of a worker; 0: not seen. */
	u64 woken_ns;
	/* Since when it waits for a CPU, or last waited: its wakeup, or when it lost its CPU. */
	u64 waits_since_ns;
	/* 0: not moved to another CPU since. */
	u64 moved_ns;
	/* How often it had left a CPU by then: once more, and that wait is over. */
	u32 switches;
	/* When it was created, in units of 1,024 ns: numbers of threads are used again. */
	u32 born_us;
	u32 tid;
	u16 moved_from;
	/* enum stopper: what it was until it was woken. */
	u8 stopper;
	u8 _unused;
	/* Who woke it, as it is shown; 0 where an interrupt did, or it was not asleep. */
	u32 waker_tid;
	/* enum throttled_by, when it lost its CPU or was woken. */
	u8 throttled_by;
	/* enum entry_kind */
	u8 entry;
	u16 waker_cpu;
	union {
		char waker[16];
		/* Of ENTRY_DISK. */
		u32 completed;
		/* Of ENTRY_TIMER: as known_timer() tells it. */
		u32 timer;
	};
};
_Static_assert(sizeof(struct wakeup) == 64, "a wakeup takes more than one cache line");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	/* User space makes it WAKEUPS long where causes are asked for. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct wakeup);
} wakeup_by_tid SEC(".maps");

/* Whether it was moved to another CPU's run queue while it waited. */
static __always_inline bool was_moved(const struct wakeup *wakeup)
{
	return wakeup->moved_ns && wakeup->moved_ns >= wakeup->waits_since_ns;
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
